"""How much memory may still be taken, by the system's word and the container's."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def available_bytes() -> int | None:
    """Memory that can be taken without swapping or being killed; None where nothing tells."""
    limits = [limit for limit in (_of_system(), _of_cgroup()) if limit is not None]
    return min(limits) if limits else None


def _of_system() -> int | None:
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def _of_cgroup() -> int | None:
    """Version 2, from the process's own group upwards is what counts; containers see theirs at the root."""
    with suppress(OSError, ValueError):
        limit = (_CGROUP / "memory.max").read_text().strip()
        if limit != "max":
            return int(limit) - int((_CGROUP / "memory.current").read_text())
    return None
