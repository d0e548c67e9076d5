"""Paged KV memory: who holds which page, shared prefixes, fork and copy-on-write, eviction.

Pages only, no tensors: `storage.py` holds those. Paging and copy-on-write as in PagedAttention
(Kwon et al. 2023, section 4).

The life of a step: `admit` new sequences, `trim` every sequence to what it still sees, `extend` it
by the tokens it will write, `publish` what becomes full, apply the copies, run the step, then
`complete` it (before releasing what finished in it) or `rollback`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

from rooftile.kvcache.page_table import PageCopy, PageTable
from rooftile.kvcache.pool import NO_PAGE, OutOfPages, PagePool
from rooftile.kvcache.prefix import GroupPage, Node, PrefixTree
from rooftile.kvcache.stats import KVStats, PageCounts


class KVCache:
    """Page tables over one page pool per KV group and one prefix tree.

    num_pages: per group. page_size: tokens per page, a power of two from 1 to 256.
    prefix_cache: whether full pages are kept and shared by their tokens; without it only forks
        share pages, and tables under a root of their own (`admit`).
    windows: the left window of each group (KVSpec.window: query i sees keys i - window to i), None
        where all tokens stay visible; by default all do.

    free + cached + in_use = total in every group after every call; in_use is 0 when no table is
    alive.

    Raises:
        ValueError: a page size that is not allowed, or num_pages or windows that do not fit
            num_groups.
    """

    def __init__(
        self,
        num_groups: int,
        num_pages: Sequence[int],
        page_size: int,
        prefix_cache: bool = True,
        windows: Sequence[int | None] | None = None,
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
        windows = (None,) * num_groups if windows is None else tuple(windows)
        if len(windows) != num_groups or any(w is not None and w < 0 for w in windows):
            raise ValueError(
                f"KVCache: windows is {list(windows)} for num_groups={num_groups}; "
                f"give one for each group, None or at least 0"
            )
        self.page_size = page_size
        self.num_pages = tuple(num_pages)
        self.prefix_cache = prefix_cache
        self._pools = [PagePool(count) for count in num_pages]
        self._windows = [(group, w) for group, w in enumerate(windows) if w is not None]
        # The first group whose pages are never given back before their sequence ends.
        self.full_group = next((group for group, w in enumerate(windows) if w is None), None)
        # A full group's leaf takes its pages in window groups along, so these are looked at last.
        self._eviction_order = sorted(range(num_groups), key=lambda g: windows[g] is not None)
        self._tree = PrefixTree(page_size, windows)
        self._mask = page_size - 1
        self._shift = page_size.bit_length() - 1
        self._queried_tokens = 0
        self._hit_tokens = 0
        self._shared_pages = 0
        self._copied_pages = 0
        self._evicted_pages = 0

    def admit(self, token_ids: Sequence[int], root: Hashable = (), own: bool = False) -> PageTable:
        """A table over the longest run of full pages that the tree has for token_ids under `root`.

        own: shares pages under `root` without a prefix cache, too, until `forget(root)`.
        Ready and pending pages count alike; the run may cover the whole prompt. Of window groups
        only the pages are needed, and taken, that are visible from the run's last token on.
        Nothing is allocated.
        """
        self._queried_tokens += len(token_ids)
        node = self._tree.root(root) if self.prefix_cache or own else None
        table = PageTable([[] for _ in self._pools], [0] * len(self._pools), 0, 0, node)
        if node is not None:
            table.num_cached = self._adopt(table, node, token_ids)
        return table

    def match_more(self, table: PageTable, token_ids: Sequence[int]) -> int:
        """Adopts the pages that the tree has got for this table's next tokens since it was matched.

        For a sequence in mid-prefill, before the step's `trim` and `extend`. Does nothing unless the
        table ends at a page boundary and all of its pages are the tree's. Returns the tokens gained.
        """
        _require_alive(table)
        node = table.node
        if node is None or table.num_tokens != node.depth << self._shift:
            return 0
        return self._adopt(table, node, token_ids)

    def trim(self, table: PageTable, first: int) -> None:
        """Gives back the pages of window groups that queries from position `first` on do not see.

        For the step that is being scheduled: `first` is the first position that it computes, and
        positions before it are computed no more. Steps in flight may still read what is given
        back; whoever gets the page writes it in a later step, and steps run in order.

        Raises:
            ValueError: `first` is beyond the table's tokens.
        """
        _require_alive(table)
        if first > table.num_tokens:
            raise ValueError(
                f"trim: first is {first} but the table has {table.num_tokens} tokens; "
                f"the next position to compute is at most that"
            )
        for group, window in self._windows:
            end = (first - window) >> self._shift
            if end > table.num_trimmed[group]:
                self._trim(table, group, end)

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
        # A partly filled page is in every group's window and not in the tree, so forks share it in
        # all groups alike and the first speaks for all.
        copy = bool(written & self._mask) and self._pools[0].refcount(columns[0][-1]) > 1
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

    def grow(self, table: PageTable, num_known: int) -> bool:
        """`extend` by one token where that is all there is to do for the table: there is room in a
        page of its own, nothing to trim, and, with the values of `num_known` tokens, nothing to
        publish. Else False, and nothing has changed.
        """
        written = table.num_tokens
        if not written & self._mask or self._windows or not table.alive:
            return False
        if self._pools[0].refcount(table.pages[0][-1]) != 1:
            return False
        node = table.node
        if node is not None and min(written + 1, num_known) >> self._shift > node.depth:
            return False
        table.num_tokens = written + 1
        return True

    def publish(self, table: PageTable, token_ids: Sequence[int], step: int) -> None:
        """Enters the table's full pages into the tree, pending under `step`, shared from now on.

        token_ids: the sequence's tokens from the start, as far as they are known; pages whose
            tokens are not all known yet wait for a later call.
        step: the step that writes the last of them; later steps have larger numbers. Publish when
            it is certain that the step will be run with this table in it, or roll it back.

        Where other tables use the tree's pages of the same tokens, this one keeps its own and does
        not publish any more; where none does, its pages take their place.
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
        for pool, column, trimmed in zip(self._pools, table.pages, table.num_trimmed, strict=True):
            for page in column[trimmed:]:
                pool.share(page)
        return PageTable(
            [column.copy() for column in table.pages],
            table.num_trimmed.copy(),
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
            for group, page in enumerate(pages):
                if page != NO_PAGE and self._pools[group].release(page) == 1:
                    self._drop(self._tree.loosen(group, page, written=False))
        table.pages = [[] for _ in self._pools]
        table.num_trimmed = [0] * len(self._pools)
        table.num_tokens = 0
        table.node = None

    def reset_prefix(self) -> None:
        """Empties the prefix tree. Live tables keep their pages and do not publish any more."""
        self._drop(self._tree.clear())

    def forget(self, root: Hashable) -> None:
        """Empties the prefix tree under one root. Its tables must have been released."""
        self._drop(self._tree.clear_root(root))

    def stats(self) -> KVStats:
        groups = tuple(self._count(group) for group in range(len(self._pools)))
        return KVStats(
            groups=groups,
            total=sum(group.total for group in groups),
            free=sum(group.free for group in groups),
            cached=sum(group.cached for group in groups),
            in_use=sum(group.in_use for group in groups),
            prefix_queries_tokens=self._queried_tokens,
            prefix_hit_tokens=self._hit_tokens,
            pages_shared_by_prefix=self._shared_pages,
            pages_copied=self._copied_pages,
            pages_evicted=self._evicted_pages,
        )

    def num_shared(self, tables: Iterable[PageTable]) -> int:
        """How many of their entries name pages that others of them name too, at least; of the first
        group without a window, 0 where there is none.
        """
        group = self.full_group
        if group is None:
            return 0
        return max(0, sum(len(table.pages[group]) for table in tables) - self._count(group).in_use)

    def _count(self, group: int) -> PageCounts:
        pool, cached = self._pools[group], self._tree.num_loose(group)
        in_use = pool.num_pages - pool.num_free - cached
        return PageCounts(pool.num_pages, pool.num_free, cached, in_use)

    def _adopt(self, table: PageTable, node: Node, token_ids: Sequence[int]) -> int:
        path = self._tree.match(node, token_ids)
        if not path:
            return 0
        gained = len(path) << self._shift
        # The path's last token may be computed again, so it is the first query yet to come.
        for group, window in self._windows:
            self._trim(table, group, (table.num_tokens + gained - 1 - window) >> self._shift)
        for group, (pool, column) in enumerate(zip(self._pools, table.pages, strict=True)):
            unseen = max(0, table.num_trimmed[group] - len(column))
            column += [NO_PAGE] * unseen
            for found in path[unseen:]:
                page = found.pages[group]
                if pool.share(page) == 2:  # the tree and this table
                    self._tree.revive(found, group)
                column.append(page)
            self._shared_pages += len(path) - unseen
        table.node = path[-1]
        table.num_tokens += gained
        self._hit_tokens += gained
        return gained

    def _trim(self, table: PageTable, group: int, end: int) -> None:
        """Gives back the table's pages before number `end`, which it may have yet to adopt."""
        start = table.num_trimmed[group]
        if end <= start:
            return
        pool, column = self._pools[group], table.pages[group]
        for index in range(start, min(end, len(column))):
            page = column[index]
            column[index] = NO_PAGE
            if pool.release(page) == 1:
                self._drop(self._tree.loosen(group, page, written=True))
        table.num_trimmed[group] = end

    def _make_room(self, count: int) -> None:
        """Evicts until `count` pages are free in every group, or raises and evicts nothing."""
        if count <= min([pool.num_free for pool in self._pools]):
            return
        for group, pool in enumerate(self._pools):
            cached = self._tree.num_loose(group)
            if count > pool.num_free + cached:
                raise OutOfPages(
                    f"{count} pages are needed in KV group {group}, which has {pool.num_free} free "
                    f"and {cached} cached of {pool.num_pages}; release a sequence, or give the "
                    f"cache more pages"
                )
        for group in self._eviction_order:
            while self._pools[group].num_free < count:
                given = self._tree.evict(group)
                self._drop(given)
                self._evicted_pages += len(given)

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
            pages = [column[index] for column in table.pages]
            child = node.children.get(key)
            if child is None:
                if max(pages) == NO_PAGE:
                    return None  # nothing would ever take such a node out of the tree again
                child = self._tree.insert(node, key, pages, step)
                self._share(pages)
            elif child.pages != pages:
                if NO_PAGE not in pages and self._tree.is_unused(child):
                    # Computed anew, as a rule because a match would have lacked a page.
                    self._drop(self._tree.renew(child, pages, step))
                    self._share(pages)
                elif not _agree(child.pages, pages):
                    return None
            node = child
        return node

    def _share(self, pages: Iterable[int]) -> None:
        for pool, page in zip(self._pools, pages, strict=True):
            if page != NO_PAGE:
                pool.share(page)

    def _drop(self, given: Iterable[GroupPage]) -> None:
        """Gives back the tree's references to pages that have left it."""
        for group, page in given:
            self._pools[group].release(page)


def _agree(one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether two page lists name the same page wherever neither has lost its own."""
    return all(a == b or NO_PAGE in (a, b) for a, b in zip(one, other, strict=True))


def _require_alive(table: PageTable) -> None:
    if not table.alive:
        raise ValueError("this page table has been released; admit the sequence again")
