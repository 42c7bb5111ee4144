"""Round stores, and agents that form rounds through them."""
