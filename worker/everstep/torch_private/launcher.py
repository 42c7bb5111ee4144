"""What torchrun counts and binds on a machine."""

from __future__ import annotations

import torch


def cpus() -> int:
    """How many processes torchrun would start on a machine without accelerators."""
    return torch._utils.cpu_count() or 1


def bound_cpus(mode: str, processes: int) -> list[set[int]]:
    """The CPUs to which torchrun would bind each local rank. It asks the GPUs. Raises what torch raises where it
    cannot: `RuntimeError`, `AssertionError`, `OSError`, `ValueError`."""
    from torch.numa import binding  # noqa: PLC0415  for few

    options = binding.NumaOptions(affinity_mode=binding.AffinityMode(mode))
    return [binding._get_logical_cpus_to_bind_to(gpu_index=i, numa_options=options) for i in range(processes)]
