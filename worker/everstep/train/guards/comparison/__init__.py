"""Compares the gradients of a new process with those of a process that has all that the script keeps by itself."""
