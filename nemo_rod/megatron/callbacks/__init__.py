"""What runs beside the steps of a training run: record, validation, and what follows from it."""
