"""Forming the next round: which agents are in it, in which order, and what has to be waited for. Pure."""
