"""How much memory the KV pages may take, and how many pages each KV group gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rooftile.kvcache.spec import KVGroup
from rooftile.planning.memory import check_memory

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
# Of one row: its token, sampling numbers and entries of lists; and of a page in its page tables.
ROW_BYTES, TABLE_ENTRY_BYTES = 128, 4


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


def check_kv_memory(
    groups: Sequence[KVGroup], pages: Sequence[int], page_size: int, rows: int, row_pages: int
) -> None:
    """Refuse more pages or rows (of row_pages page-table entries a group) than memory can hold.

    Raises:
        ValueError: gives the bytes, and what to lower.
    """
    check_memory(
        f"num_pages {max(pages)} with page_size {page_size}",
        sum(n * page_size * g.bytes_per_token for n, g in zip(pages, groups, strict=True)),
        "lower num_pages",
    )
    check_memory(
        f"max_num_seqs {rows}, with page tables of {row_pages} pages each,",
        rows * (ROW_BYTES + TABLE_ENTRY_BYTES * row_pages * len(groups)),
        "lower max_num_seqs or max_model_len",
    )


@dataclass(frozen=True)
class Demand:
    """The most that sequences can ask of KV memory.

    max_step_tokens: tokens of one sequence in one step.
    """

    page_size: int
    max_num_seqs: int
    max_model_len: int
    max_step_tokens: int

    def pages_per_sequence(self, window: int | None) -> int:
        """Pages of one KV group that one sequence holds at most.

        In a window group: the window before a step's first token, and the step's tokens, which
        begin and end anywhere in a page.
        """
        most = -(-self.max_model_len // self.page_size)
        if window is None:
            return most
        return min(most, -(-(window + self.max_step_tokens) // self.page_size) + 2)

    def pages(self, windows: Sequence[int | None]) -> list[int]:
        """The most pages of each group that are worth having."""
        return [self.max_num_seqs * self.pages_per_sequence(window) for window in windows]

    def tokens_kept(self, windows: Sequence[int | None], num_pages: Sequence[int]) -> int:
        """Tokens that num_pages pages of each group keep, shared by all sequences.

        A window group that holds what one sequence can ask of it ends none, so it does not count;
        without any other group a single sequence may have max_model_len.
        """
        kept = [
            pages * self.page_size
            for window, pages in zip(windows, num_pages, strict=True)
            if window is None or pages < self.pages_per_sequence(window)
        ]
        return min(kept, default=self.max_model_len)


def pages_that_fit(
    groups: Sequence[KVGroup], page_size: int, memory_bytes: int, most_pages: Sequence[int]
) -> list[int]:
    """Pages of each KV group: the same number in each, but no more than its `most_pages`.

    What a group does not need goes to the others.

    Raises:
        ValueError: not even one page fits.
    """
    page_bytes = [page_size * group.bytes_per_token for group in groups]
    if memory_bytes < sum(page_bytes):
        raise ValueError(
            f"a KV page takes {sum(page_bytes)} bytes and only {memory_bytes} may be used; raise "
            f"kv_memory_share, give num_pages, or take a smaller page_size"
        )
    level = 0
    for most in sorted(set(most_pages)):
        row = sum(b for b, limit in zip(page_bytes, most_pages, strict=True) if limit >= most)
        rise = min(most - level, memory_bytes // row)
        memory_bytes -= rise * row
        level += rise
        if level < most:
            break
    return [min(level, most) for most in most_pages]
