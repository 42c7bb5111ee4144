"""Reads the text of the script's loop, and finds values that a new process would not have. Runs none of the script."""
