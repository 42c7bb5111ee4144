"""Forms the next round: which agents are in it, in which order, and what must be waited for. Pure."""
