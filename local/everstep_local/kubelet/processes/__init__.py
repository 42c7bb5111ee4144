"""The processes of one container, their guard and log, and the folder of a whole run."""
