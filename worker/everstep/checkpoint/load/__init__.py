"""From a commit to live tensors: what fits, what is read, and which commit is taken."""
