"""What all ranks do after the same step: save, stop, change to the next round, and find stragglers."""
