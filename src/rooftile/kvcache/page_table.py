"""The page table of one sequence."""

from __future__ import annotations

from dataclasses import dataclass

from rooftile.kvcache.prefix import Node


@dataclass(frozen=True)
class PageCopy:
    """Copy page `source` to page `target` in every layer of KV group `group`."""

    group: int
    source: int
    target: int


class PageTable:
    """Which pages hold one sequence's KV. Read it freely; only KVCache changes it.

    pages: per KV group, page ids in token order; token t lies in pages[g][t // page_size] at
        offset t % page_size. NO_PAGE where its tokens have left the group's window.
    num_trimmed: per KV group, how many entries are NO_PAGE: the first ones.
    num_tokens: tokens that have slots and are written or scheduled to be.
    num_cached: how many of them came from the prefix tree at admission.
    node: the deepest tree node on its path (of its first node.depth pages, those that it holds are
        the tree's too), or None when it neither publishes nor takes from the tree any more.
    alive: False once released.
    """

    __slots__ = ("alive", "node", "num_cached", "num_tokens", "num_trimmed", "pages")

    def __init__(
        self,
        pages: list[list[int]],
        num_trimmed: list[int],
        num_tokens: int,
        num_cached: int,
        node: Node | None,
    ) -> None:
        self.pages = pages
        self.num_trimmed = num_trimmed
        self.num_tokens = num_tokens
        self.num_cached = num_cached
        self.node = node
        self.alive = True

    @property
    def num_pages(self) -> int:
        """Pages that it holds, of all groups."""
        return sum(len(column) for column in self.pages) - sum(self.num_trimmed)

    def __repr__(self) -> str:
        state = "" if self.alive else ", released"
        return f"PageTable({self.num_tokens} tokens, pages={self.pages}{state})"
