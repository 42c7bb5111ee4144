"""Training processes: forking them, their environment, the agent's messages to them, and how they ended."""
