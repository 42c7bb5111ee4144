"""The agent of one simulated node: it runs the pods that are bound to its node as processes of this machine."""
