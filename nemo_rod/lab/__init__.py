"""Tools that read the folders of a run or start one: reports, plans, rehearsals, tasks."""
