"""Connections between agents, which show a dead process or a broken network early: the failure detector."""
