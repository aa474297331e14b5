"""Starts and stops the processes of a job, on one machine or several."""
