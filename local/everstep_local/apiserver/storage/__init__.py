"""Every version of every object, the feed of its changes, and JSON values that are shared without copies."""
