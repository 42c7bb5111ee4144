"""A real API server, the operator's client, and the operator at work in it."""
