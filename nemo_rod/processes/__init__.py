"""How the processes of a job start, on one machine or several, and how they are asked to stop."""
