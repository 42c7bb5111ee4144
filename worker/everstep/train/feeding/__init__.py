"""What a run trains on, and what a script has cut for its world besides."""
