"""Brings the members of a new round to one state."""
