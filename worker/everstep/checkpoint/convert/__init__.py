"""Checkpoints of other libraries, in and out, and commits of one store in another."""
