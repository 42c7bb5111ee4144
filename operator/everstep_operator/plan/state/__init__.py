"""Derives what is known of a job from a snapshot. It does not decide what should be done."""
