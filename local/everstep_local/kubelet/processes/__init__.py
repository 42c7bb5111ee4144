"""The processes of one container, the guard above them, their log, and the folder that holds all of a run."""
