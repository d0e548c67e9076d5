"""The prefix tree: which page holds the KV of which tokens after which prefix."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from weakref import WeakValueDictionary

from rooftile.kvcache.pool import NO_PAGE

GroupPage = tuple[int, int]  # KV group, page


class Node:
    """One full page's worth of tokens after the tokens of its ancestors.

    key: its page_size token ids (of a root: nothing); children are found by comparing whole keys,
        so equal hashes never make two prefixes the same.
    pages: one page per KV group; NO_PAGE where a window group has lost it (the node is hollow
        there).
    depth: pages from the root up to and including this one.
    step: the step that will fill the page (pending), or None (ready).
    attached: whether it is still in the tree; tables may outlive the nodes that they point to. A
        node that is not has no children and gets none.
    """

    __slots__ = (
        "__weakref__",
        "attached",
        "children",
        "depth",
        "key",
        "pages",
        "parent",
        "step",
    )

    def __init__(
        self,
        parent: Node | None,
        key: tuple[int, ...],
        pages: list[int],
        step: int | None,
    ) -> None:
        self.parent = parent
        self.key = key
        self.pages = pages
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.step = step
        self.attached = True
        self.children: dict[tuple[int, ...], Node] = {}


class PrefixTree:
    """Nodes by exact tokens under roots (any hashable, such as (salt, adapter)).

    windows: the left window of each KV group, None for a full one.

    The tree does not count references; its owner tells it when only the tree holds a page
    (`loosen`) and when a table holds it again (`revive`), and gives back the pages that the tree's
    methods return.

    A table refers to a whole path in full groups and is released deepest page first, so a node that
    is loose there is loose in all groups, and its descendants are and were before it: the least
    recently used one is always a leaf, which is evicted whole. In a window group tables let go of
    single pages, so they are evicted one by one and leave hollow nodes. Without a full group, a
    node is gone with its last page and child.
    """

    def __init__(self, page_size: int, windows: Sequence[int | None] = (None,)) -> None:
        self.page_size = page_size
        self._windows = [(group, w) for group, w in enumerate(windows) if w is not None]
        self._full_groups = [group for group, window in enumerate(windows) if window is None]
        # Full groups are alike, so the first one speaks for all.
        self._full = self._full_groups[0] if self._full_groups else None
        # A root lives as long as a child or a table refers to it, so that used-up salts vanish.
        self._roots: WeakValueDictionary[Hashable, Node] = WeakValueDictionary()
        # Page -> node, in window groups and the first full one.
        self._owners: list[dict[int, Node]] = [{} for _ in windows]
        # Nodes whose page of the group only the tree holds, least recently used first; full groups
        # share one queue.
        self._loose: list[OrderedDict[Node, None]] = [OrderedDict() for _ in windows]
        for group in self._full_groups:
            self._loose[group] = self._loose[self._full_groups[0]]
        self._pending: dict[int, list[Node]] = {}

    def num_loose(self, group: int) -> int:
        """Pages of the group that only the tree holds; all of them can be evicted."""
        return len(self._loose[group])

    def root(self, key: Hashable) -> Node:
        node = self._roots.get(key)
        if node is None:
            node = self._roots[key] = Node(None, (), [], None)
        return node

    def match(self, node: Node, token_ids: Sequence[int]) -> list[Node]:
        """The longest path below `node` whose keys continue token_ids (which start at the root),
        and whose end has all pages that its next query sees.

        That query is at the earliest the last token of the path: of a prompt that is cached whole,
        the last token is computed again. Pages before the path are there: a table at `node` that
        has trimmed some did so for earlier queries.
        """
        size = self.page_size
        path: list[Node] = []
        usable = 0
        whole_from = [0] * len(self._windows)  # pages after the last hollow node
        for start in range(node.depth * size, len(token_ids) - size + 1, size):
            child = node.children.get(tuple(token_ids[start : start + size]))
            if child is None:
                break
            path.append(child)
            node = child
            whole = True
            for at, (group, window) in enumerate(self._windows):
                if child.pages[group] == NO_PAGE:
                    whole_from[at] = child.depth
                whole &= whole_from[at] * size <= max(0, start + size - 1 - window)
            if whole:
                usable = len(path)
        return path[:usable]

    def insert(self, parent: Node, key: tuple[int, ...], pages: list[int], step: int) -> Node:
        """A new node, pending under `step`."""
        node = Node(parent, key, [NO_PAGE] * len(pages), None)
        parent.children[key] = node
        self._fill(node, pages, step)
        return node

    def is_unused(self, node: Node) -> bool:
        """Whether a ready node has only pages that no table holds."""
        if self._full is not None:
            return node in self._loose[self._full]
        return node.step is None and all(
            page == NO_PAGE or node in loose
            for page, loose in zip(node.pages, self._loose, strict=True)
        )

    def renew(self, node: Node, pages: list[int], step: int) -> list[GroupPage]:
        """Gives an unused node other pages for the same tokens, pending under `step`.

        Returns the old ones.
        """
        given = self._empty(node)
        self._fill(node, pages, step)
        return given

    def loosen(self, group: int, page: int, written: bool) -> list[GroupPage]:
        """A table has let go of `page`, which has one holder left: the tree or another table.

        written: whether the step that writes it has been launched, if it is pending. What that
            step may never write is dropped, and returned.
        """
        node = self._owners[group].get(page)
        if node is None:
            return []
        if node.step is None or written:
            self._loose[group][node] = None
            return []
        return self.remove(node) if group == self._full else self._hollow(node, group)

    def revive(self, node: Node, group: int) -> None:
        """A table holds the node's page of this group again."""
        self._loose[group].pop(node, None)

    def evict(self, group: int) -> list[GroupPage]:
        """Takes out what was least recently used: a page of a window group, or a whole leaf."""
        node = next(iter(self._loose[group]))
        return self.remove(node) if group in self._full_groups else self._hollow(node, group)

    def complete(self, step: int) -> None:
        for node in self._pending.pop(step, ()):
            node.step = None

    def rollback(self, step: int) -> list[GroupPage]:
        """Takes out what is pending under `step` or a later one, with all descendants."""
        given = []
        for later in [pending for pending in self._pending if pending >= step]:
            for node in self._pending.pop(later):
                if node.attached:
                    given += self.remove(node)
        return given

    def clear_root(self, key: Hashable) -> list[GroupPage]:
        root = self._roots.pop(key, None)
        if root is None:
            return []
        root.attached = False
        return [given for child in list(root.children.values()) for given in self.remove(child)]

    def clear(self) -> list[GroupPage]:
        given = [page for key in list(self._roots) for page in self.clear_root(key)]
        self._roots = WeakValueDictionary()
        self._pending.clear()
        return given

    def remove(self, node: Node) -> list[GroupPage]:
        """Takes `node` and its descendants out of the tree."""
        parent = node.parent
        assert parent is not None
        given = []
        del parent.children[node.key]
        removed = [node]
        for gone in removed:  # grows while it is walked
            removed += gone.children.values()
            gone.children = {}
            gone.parent = None
            gone.attached = False
            given += self._empty(gone)
        self._prune(parent)
        return given

    def _fill(self, node: Node, pages: list[int], step: int) -> None:
        node.pages = pages
        node.step = step
        self._pending.setdefault(step, []).append(node)
        for group, _ in self._windows:
            if pages[group] != NO_PAGE:
                self._owners[group][pages[group]] = node
        if self._full is not None:
            self._owners[self._full][pages[self._full]] = node

    def _empty(self, node: Node) -> list[GroupPage]:
        given = [(group, page) for group, page in enumerate(node.pages) if page != NO_PAGE]
        for group, page in given:
            self._owners[group].pop(page, None)
            self._loose[group].pop(node, None)
        return given

    def _hollow(self, node: Node, group: int) -> list[GroupPage]:
        page = node.pages[group]
        node.pages[group] = NO_PAGE
        del self._owners[group][page]
        self._loose[group].pop(node, None)
        self._prune(node)
        return [(group, page)]

    def _prune(self, node: Node) -> None:
        """Without a full group: takes out `node` and ancestors that have no page and no child."""
        if self._full is not None:
            return
        while node.parent is not None and not node.children and max(node.pages) == NO_PAGE:
            parent = node.parent
            del parent.children[node.key]
            node.parent = None
            node.attached = False
            node = parent
