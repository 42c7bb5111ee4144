"""The connections between agents, by which a dead process or a broken network is known early."""
