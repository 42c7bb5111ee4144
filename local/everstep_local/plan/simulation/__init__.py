"""A cluster simulated in memory, on which transcripts of the planner are played. Nothing here reaches a real one."""
