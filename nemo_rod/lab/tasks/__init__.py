"""Benchmark tasks: the losses and gains of a trained model beside those of its corpora."""
