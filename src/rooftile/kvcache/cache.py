"""Paged KV memory: who holds which page, shared prefixes, fork and copy-on-write, eviction.

Pages only, no tensors: `storage.py` holds those. Paging and copy-on-write as in PagedAttention
(Kwon et al. 2023, section 4).

The life of a step: `admit` new sequences, `extend` every sequence by the tokens it will write,
`publish` what becomes full, apply the copies, run the step, then `complete` it (before releasing
what finished in it) or `rollback`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from rooftile.kvcache.page_table import PageCopy, PageTable
from rooftile.kvcache.pool import OutOfPages, PagePool
from rooftile.kvcache.prefix import Node, PrefixTree


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


class KVCache:
    """Page tables over one page pool per KV group and one prefix tree.

    num_pages: per group. page_size: tokens per page, a power of two from 1 to 256.
    prefix_cache: whether full pages are kept and shared by their tokens; without it only forks
        share pages.

    free + cached + in_use = total in every group after every call; in_use is 0 when no table is
    alive.

    Raises:
        ValueError: a page size that is not allowed, or num_pages that do not fit num_groups.
    """

    def __init__(
        self, num_groups: int, num_pages: Sequence[int], page_size: int, prefix_cache: bool = True
    ) -> None:
        if page_size < 1 or page_size > 256 or page_size & (page_size - 1):
            raise ValueError(
                f"KVCache: page_size is {page_size}; it must be a power of two from 1 to 256"
            )
        if num_groups < 1 or len(num_pages) != num_groups:
            raise ValueError(
                f"KVCache: num_pages is {list(num_pages)} for num_groups={num_groups}; "
                f"give one number for each of at least one group"
            )
        self.page_size = page_size
        self.num_pages = tuple(num_pages)
        self.prefix_cache = prefix_cache
        self._pools = [PagePool(count) for count in num_pages]
        # A table holds pages in every group alike, so the first group's counts speak for all.
        self._first = self._pools[0]
        self._tree = PrefixTree(page_size)
        self._mask = page_size - 1
        self._shift = page_size.bit_length() - 1
        self._queried_tokens = 0
        self._hit_pages = 0
        self._copied_pages = 0
        self._evicted_nodes = 0

    def admit(self, token_ids: Sequence[int], root: Hashable = ()) -> PageTable:
        """A table over the longest run of full pages that the tree has for token_ids under `root`.

        Ready and pending pages count alike; the run may cover the whole prompt. Nothing is
        allocated.
        """
        self._queried_tokens += len(token_ids)
        node = self._tree.root(root) if self.prefix_cache else None
        table = PageTable([[] for _ in self._pools], 0, 0, node)
        if node is not None:
            table.num_cached = self._adopt(table, node, token_ids)
        return table

    def match_more(self, table: PageTable, token_ids: Sequence[int]) -> int:
        """Adopts the pages that the tree has got for this table's next tokens since it was matched.

        For a sequence in mid-prefill. Does nothing unless the table ends at a page boundary and all
        of its pages are the tree's. Returns the tokens gained.
        """
        _require_alive(table)
        node = table.node
        if node is None or table.num_tokens != node.depth << self._shift:
            return 0
        return self._adopt(table, node, token_ids)

    def extend(self, table: PageTable, num_tokens: int) -> list[PageCopy]:
        """Makes room for tokens up to `num_tokens` in all, evicting unused prefixes as needed.

        A partly filled last page that other tables read too is replaced by a copy; the last sharer
        keeps the page. The returned copies, of all tables of a step in the order of the calls, must
        be applied before the step writes.

        Raises:
            OutOfPages: free and cached pages do not suffice; nothing has changed.
            ValueError: fewer tokens than the table has.
        """
        _require_alive(table)
        written = table.num_tokens
        if num_tokens <= written:
            if num_tokens < written:
                raise ValueError(
                    f"extend: num_tokens is {num_tokens} but the table has {written} already; "
                    f"a table does not shrink, release it"
                )
            return []
        columns = table.pages
        grow = ((num_tokens + self._mask) >> self._shift) - len(columns[0])
        copy = bool(written & self._mask) and self._first.refcount(columns[0][-1]) > 1
        copies = []
        if grow or copy:
            self._make_room(grow + copy)
            if copy:
                copies = self._copy_last_page(table)
            for pool, column in zip(self._pools, columns, strict=True):
                for _ in range(grow):
                    column.append(pool.allocate())
        table.num_tokens = num_tokens
        return copies

    def publish(self, table: PageTable, token_ids: Sequence[int], step: int) -> None:
        """Enters the table's full pages into the tree, pending under `step`, shared from now on.

        token_ids: the sequence's tokens from the start, as far as they are known; pages whose
            tokens are not all known yet wait for a later call.
        step: the step that writes the last of them; later steps have larger numbers. Publish when
            it is certain that the step will be run with this table in it, or roll it back.

        Where the tree has the same tokens in another page, the table keeps its own and does not
        publish any more.
        """
        _require_alive(table)
        node = table.node
        if node is None:
            return
        num_full = min(table.num_tokens, len(token_ids)) >> self._shift
        if num_full <= node.depth:
            return
        table.node = self._publish(table, node, num_full, token_ids, step)

    def complete(self, step: int) -> None:
        """The step has run: its pending pages are ready."""
        self._tree.complete(step)

    def rollback(self, step: int) -> None:
        """The step has failed: what was published under it leaves the tree, with what follows it.

        That includes everything pending under later steps, which may rest on what this one did not
        write. Tables that hold such pages stay valid until released, but do not publish any more;
        recompute their sequences from `admit`.
        """
        self._drop(self._tree.rollback(step))

    def fork(self, table: PageTable) -> PageTable:
        """A second table over the same pages, a partly filled last one included.

        Extend neither of the two in the step that still has to write a shared partly filled page:
        a step's copies come before its writes.
        """
        _require_alive(table)
        for pool, column in zip(self._pools, table.pages, strict=True):
            for page in column:
                pool.share(page)
        return PageTable(
            [column.copy() for column in table.pages],
            table.num_tokens,
            table.num_cached,
            table.node,
        )

    def release(self, table: PageTable) -> None:
        """Ends a table. Its pages are freed, or cached where they are the tree's and ready.

        Cached pages are evicted in the order of their release, a sequence's deepest first.

        Raises:
            ValueError: it was released before.
        """
        _require_alive(table)
        table.alive = False
        for pages in reversed(list(zip(*table.pages, strict=True))):
            for pool, page in zip(self._pools, pages, strict=True):
                left = pool.release(page)
            # One holder left: the tree, or another table.
            if left == 1 and (node := self._tree.owner(pages[0])) is not None:
                self._drop(self._tree.retire(node))
        table.pages = [[] for _ in self._pools]
        table.num_tokens = 0
        table.node = None

    def reset_prefix(self) -> None:
        """Empties the prefix tree. Live tables keep their pages and do not publish any more."""
        self._drop(self._tree.clear())

    def stats(self) -> KVStats:
        cached = self._tree.num_idle
        groups = tuple(
            PageCounts(
                pool.num_pages, pool.num_free, cached, pool.num_pages - pool.num_free - cached
            )
            for pool in self._pools
        )
        return KVStats(
            groups=groups,
            total=sum(group.total for group in groups),
            free=sum(group.free for group in groups),
            cached=sum(group.cached for group in groups),
            in_use=sum(group.in_use for group in groups),
            prefix_queries_tokens=self._queried_tokens,
            prefix_hit_tokens=self._hit_pages * self.page_size,
            pages_shared_by_prefix=self._hit_pages * len(groups),
            pages_copied=self._copied_pages,
            pages_evicted=self._evicted_nodes * len(groups),
        )

    def _adopt(self, table: PageTable, node: Node, token_ids: Sequence[int]) -> int:
        path = self._tree.match(node, token_ids)
        if not path:
            return 0
        for found in path:
            for pool, page, column in zip(self._pools, found.pages, table.pages, strict=True):
                holders = pool.share(page)
                column.append(page)
            if holders == 2:  # the tree and this table: it was idle
                self._tree.revive(found)
        gained = len(path) << self._shift
        table.node = path[-1]
        table.num_tokens += gained
        self._hit_pages += len(path)
        return gained

    def _make_room(self, count: int) -> None:
        """Evicts until `count` pages are free in every group, or raises and evicts nothing."""
        free = min([pool.num_free for pool in self._pools])
        missing = count - free
        if missing <= 0:
            return
        cached = self._tree.num_idle
        if missing > cached:
            group = min(range(len(self._pools)), key=lambda g: self._pools[g].num_free)
            raise OutOfPages(
                f"{count} pages are needed in KV group {group}, which has {free} free and {cached} "
                f"cached of {self.num_pages[group]}; release a sequence, or give the cache more pages"
            )
        for _ in range(missing):
            self._drop(self._tree.evict())
        self._evicted_nodes += missing

    def _copy_last_page(self, table: PageTable) -> list[PageCopy]:
        copies = []
        for group, (pool, column) in enumerate(zip(self._pools, table.pages, strict=True)):
            source, target = column[-1], pool.allocate()
            pool.release(source)
            column[-1] = target
            copies.append(PageCopy(group, source, target))
        self._copied_pages += len(copies)
        return copies

    def _publish(
        self, table: PageTable, node: Node, num_full: int, token_ids: Sequence[int], step: int
    ) -> Node | None:
        if not node.attached:
            return None
        size = self.page_size
        for index in range(node.depth, num_full):
            key = tuple(token_ids[index * size : (index + 1) * size])
            pages = tuple([column[index] for column in table.pages])
            child = node.children.get(key)
            if child is None:
                child = self._tree.insert(node, key, pages, step)
                for pool, page in zip(self._pools, pages, strict=True):
                    pool.share(page)
            elif child.pages != pages:
                return None
            node = child
        return node

    def _drop(self, nodes: Iterable[Node]) -> None:
        """Gives back the tree's references to pages of nodes that have left it."""
        for node in nodes:
            for pool, page in zip(self._pools, node.pages, strict=True):
                pool.release(page)


def _require_alive(table: PageTable) -> None:
    if not table.alive:
        raise ValueError("this page table has been released; admit the sequence again")
