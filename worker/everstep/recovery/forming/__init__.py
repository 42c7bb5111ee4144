"""The gloo groups of one round: how they are made, and how they are closed."""
