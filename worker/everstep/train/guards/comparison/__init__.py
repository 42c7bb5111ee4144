"""Compares the gradients of a process with those of one that has what a script keeps by itself."""
