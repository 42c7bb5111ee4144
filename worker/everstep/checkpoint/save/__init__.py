"""From live tensors to a commit: what this rank writes, the copy, the shard, the writer's thread."""
