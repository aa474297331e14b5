"""`nemo-rod inspect`: the contents of any file or folder that nemo_rod writes."""
