"""How many pages are where, and what was shared."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PageCounts:
    """Pages now: in_use (a live table refers to them), cached (only the prefix tree does), free."""

    total: int
    free: int
    cached: int
    in_use: int


@dataclass(frozen=True)
class KVStats:
    """Pages now, per KV group and summed over groups, and totals since the cache was made.

    prefix_queries_tokens: tokens of all admitted sequences.
    prefix_hit_tokens: of those, found in the prefix tree, at admission or by match_more.
    pages_shared_by_prefix, pages_copied, pages_evicted: pages taken from the prefix tree, copied
        on write, and evicted; summed over groups.
    """

    groups: tuple[PageCounts, ...]
    total: int
    free: int
    cached: int
    in_use: int
    prefix_queries_tokens: int
    prefix_hit_tokens: int
    pages_shared_by_prefix: int
    pages_copied: int
    pages_evicted: int
