"""Which samples each rank reads in each step: decided without torch, clock or chance."""
