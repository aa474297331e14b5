"""`nemo-rod probe`: some steps of a recipe, to see whether and where it forgets."""
