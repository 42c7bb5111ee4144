"""The state that the session adds to the tracked one, and its knowledge of the kinds of tracked objects."""
