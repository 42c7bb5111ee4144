"""The planner turns one observation of a job into one plan. It is pure: no clock, no I/O, no randomness, no logging.

Read `planner.py` first. `state` derives facts, `decide` has the policies, `render` writes the plan.
"""
