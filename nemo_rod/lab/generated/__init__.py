"""Replay for those who have no pretraining data: text that the base itself writes."""
