"""Agents, and jobs of several of them."""
