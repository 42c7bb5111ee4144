"""Training processes: how they are forked, what they run in, how the agent speaks with them, and how they ended."""
