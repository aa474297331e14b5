"""What a run is: its recipe checked, its arms resolved, its stages, and the folder they fill."""
