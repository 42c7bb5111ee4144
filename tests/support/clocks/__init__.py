"""Clocks and event loops whose time a test moves."""
