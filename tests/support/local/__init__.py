"""Jobs of local mode, and its nodes."""
