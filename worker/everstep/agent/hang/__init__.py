"""Watching for processes that hang, and for ranks whose collectives do not match."""
