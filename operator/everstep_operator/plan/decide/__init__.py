"""Decides what should be done: one policy a file. A policy reads facts and returns a decision with its reason."""
