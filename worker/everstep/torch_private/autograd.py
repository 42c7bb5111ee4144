"""Autograd: whether a backward pass runs, and whether somebody profiles."""

from __future__ import annotations

import torch


def backward_pass() -> int:
    """The number of the backward pass in which this thread is; -1 outside of one."""
    return torch._C._current_graph_task_id()


def is_profiled() -> bool:
    """Whether a profiler of torch runs in this process. A second one would end it."""
    return torch._C._autograd._profiler_enabled()
