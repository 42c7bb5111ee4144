"""Interfaces of other libraries over Everstep, so that scripts that were written for them run unchanged."""
