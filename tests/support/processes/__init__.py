"""Processes that tests start, watch and stop."""
