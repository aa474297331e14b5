"""How the processes of a job are started and stopped, on one machine or several."""
