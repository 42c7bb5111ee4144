"""Puts back what a failed step has moved, so that the step can begin again."""
