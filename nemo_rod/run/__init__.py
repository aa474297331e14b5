"""What a run is: its checked recipe, its resolved arms, its stages, and their folder."""
