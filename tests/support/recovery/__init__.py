"""Training processes that form rounds, are killed and recover."""
