"""Reads the text of the script's loop, and finds what a new process would not have. Runs none of it."""
