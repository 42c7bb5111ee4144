"""Jobs on a cluster with nodes."""
