"""Undoes the changes of a failed step, so that the step can begin again."""
