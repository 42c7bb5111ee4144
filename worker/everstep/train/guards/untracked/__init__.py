"""Watches what training moves, and finds what nothing tracked holds."""
