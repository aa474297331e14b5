"""Parts for nemo_rod, one of each kind that a package may add; docs/extending.md explains them."""
