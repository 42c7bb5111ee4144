"""What a script sees of torch.distributed: groups that it keeps while their members change."""
