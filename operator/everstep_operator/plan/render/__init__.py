"""Writes the plan from a decision: pods and other objects, status, conditions, events and the record of a recovery."""
