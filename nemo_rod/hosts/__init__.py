"""Other trainers that lend their training step to the selector; the house imports none of them."""
