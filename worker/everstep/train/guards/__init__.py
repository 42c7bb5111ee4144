"""Finds scripts that could not be recovered right, and refuses them by name."""
