"""Finds processes that hang, and ranks whose collectives do not match."""
