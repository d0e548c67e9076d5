"""Memory that this process could ever have, and the refusal of what would need more."""

from __future__ import annotations

import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def total_bytes() -> int:
    """The machine's memory, or less where a container limits it."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
    except OSError:
        return total  # no cgroup v2 here, or the root group, which has no limit
    return total if limit == "max" else min(total, int(limit))


def check_memory(what: str, nbytes: int, remedy: str) -> None:
    """Refuse an allocation that cannot succeed before any of it is made.

    Raises:
        ValueError: says how many bytes `what` needs, how many there are, and the remedy.
    """
    total = total_bytes()
    if nbytes > total:
        raise ValueError(f"{what} needs {nbytes} bytes of memory and there are {total}; {remedy}")
