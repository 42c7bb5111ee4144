"""Finds scripts that could not be recovered correctly, and refuses them with the name of what is wrong."""
