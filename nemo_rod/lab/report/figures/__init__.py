"""The figures of a report: registered functions from results to a `Picture`."""

from nemo_rod.lab.report.figures.picture import Picture, pictures_of

__all__ = ["Picture", "pictures_of"]
