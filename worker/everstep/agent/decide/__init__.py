"""What the agent does next, decided without clock, chance or I/O: `machine` takes events and gives instructions."""
