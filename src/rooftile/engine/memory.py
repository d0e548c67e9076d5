"""How much memory the KV pages may take."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rooftile.kvcache.spec import KVGroup

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


def free_memory_bytes() -> int:
    """Memory this process can still take: the system's, or less where a container limits it."""
    free = _available()
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
        used = int((CGROUP / "memory.current").read_text())
    except OSError:
        return free  # no cgroup v2 here, or the root group, which has no limit
    return free if limit == "max" else min(free, max(0, int(limit) - used))


def _available() -> int:
    for line in MEMINFO.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024  # the kernel's kB are KiB
    raise RuntimeError(f"{MEMINFO} has no line MemAvailable; give num_pages")


def pages_that_fit(
    groups: Sequence[KVGroup], page_size: int, memory_bytes: int, most_tokens: int
) -> int:
    """Pages a KV group, the same number in each; no more than most_tokens tokens need.

    Raises:
        ValueError: not even one page fits.
    """
    page_bytes = page_size * sum(group.bytes_per_token for group in groups)
    pages = memory_bytes // page_bytes
    if pages < 1:
        raise ValueError(
            f"a KV page takes {page_bytes} bytes and only {memory_bytes} may be used; raise "
            f"kv_memory_share, give num_pages, or take a smaller page_size"
        )
    return min(pages, -(-most_tokens // page_size))
