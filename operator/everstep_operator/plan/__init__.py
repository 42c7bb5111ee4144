"""The planner: one observation of a job in, one plan out. Pure: no clock, no I/O, no randomness, no logging.

Read `planner.py` first; every other module is one policy that it consults.
"""
