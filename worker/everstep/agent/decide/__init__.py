"""The agent's decisions, without clock, randomness or I/O: `machine` takes events and gives instructions."""
