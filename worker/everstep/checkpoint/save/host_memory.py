"""How much host memory this process may still take, by the machine and by its container."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")


def free_host_memory() -> int:
    """Bytes that this process may still allocate, as far as is known."""
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        known = dict(line.split(":") for line in _MEMINFO.read_text().splitlines())
        found = int(known["MemAvailable"].split()[0]) * 1024
        most = (_CGROUP / "memory.max").read_text().strip()
        if most != "max":
            stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
            used = int((_CGROUP / "memory.current").read_text()) - int(stat.get("inactive_file", 0))
            found = min(found, int(most) - used)
    except (OSError, ValueError, KeyError):
        pass  # not Linux, no cgroup v2, or the root cgroup
    return max(found, 0)
