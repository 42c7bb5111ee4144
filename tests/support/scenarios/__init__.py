"""Scenarios: texts of what is done to a job, and a player that does it."""
