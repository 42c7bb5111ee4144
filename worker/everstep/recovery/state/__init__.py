"""What the session adds to the tracked state, and what it knows of the kinds of tracked objects."""
