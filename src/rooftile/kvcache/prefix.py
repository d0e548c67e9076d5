"""The prefix tree: which page holds the KV of which tokens after which prefix."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from weakref import WeakValueDictionary


class Node:
    """One full page's worth of tokens after the tokens of its ancestors.

    key: its page_size token ids (of a root: nothing); children are found by comparing whole keys,
        so equal hashes never make two prefixes the same.
    pages: one page per KV group.
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
        pages: tuple[int, ...],
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

    The tree does not count references; its owner tells it when a node goes out of use (`retire`:
    no table refers to it any more) and comes back (`revive`). Because a table refers to a whole
    path and is retired deepest page first, an idle node's descendants are idle and older in the
    queue: its head, the least recently used node, is always a leaf.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        # A root lives as long as a child or a table refers to it, so that used-up salts vanish.
        self._roots: WeakValueDictionary[Hashable, Node] = WeakValueDictionary()
        self._by_page: dict[int, Node] = {}  # page of the first group -> node
        self._idle: OrderedDict[Node, None] = OrderedDict()  # least recently used first
        self._pending: dict[int, list[Node]] = {}

    def __len__(self) -> int:
        return len(self._by_page)

    @property
    def num_idle(self) -> int:
        """Nodes that no table refers to; all of them can be evicted."""
        return len(self._idle)

    def root(self, key: Hashable) -> Node:
        node = self._roots.get(key)
        if node is None:
            node = self._roots[key] = Node(None, (), (), None)
        return node

    def owner(self, page: int) -> Node | None:
        """The node that holds this page of the first group."""
        return self._by_page.get(page)

    def match(self, node: Node, token_ids: Sequence[int]) -> list[Node]:
        """The longest path below `node` whose keys continue token_ids (which start at the root)."""
        size = self.page_size
        path = []
        for start in range(node.depth * size, len(token_ids) - size + 1, size):
            child = node.children.get(tuple(token_ids[start : start + size]))
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def insert(self, parent: Node, key: tuple[int, ...], pages: tuple[int, ...], step: int) -> Node:
        """A new node in use, pending under `step`."""
        node = Node(parent, key, pages, step)
        parent.children[key] = node
        self._by_page[pages[0]] = node
        self._pending.setdefault(step, []).append(node)
        return node

    def retire(self, node: Node) -> list[Node]:
        """No table refers to `node` any more. Returns the nodes that left the tree by that.

        A pending page that nobody waits for is not worth keeping, and its step may never be run.
        """
        if node.step is not None:
            return self.remove(node)
        self._idle[node] = None
        return []

    def revive(self, node: Node) -> None:
        """A table refers to the idle `node` again."""
        del self._idle[node]

    def evict(self) -> list[Node]:
        """Takes the least recently used leaf out of the tree."""
        return self.remove(next(iter(self._idle)))

    def complete(self, step: int) -> None:
        for node in self._pending.pop(step, ()):
            node.step = None

    def rollback(self, step: int) -> list[Node]:
        """Takes out what is pending under `step` or a later one, with all descendants."""
        removed = []
        for later in [pending for pending in self._pending if pending >= step]:
            for node in self._pending.pop(later):
                if node.attached:
                    removed += self.remove(node)
        return removed

    def clear(self) -> list[Node]:
        removed = []
        for root in list(self._roots.values()):
            root.attached = False
            for child in list(root.children.values()):
                removed += self.remove(child)
        self._roots = WeakValueDictionary()
        self._pending.clear()
        return removed

    def remove(self, node: Node) -> list[Node]:
        """Takes `node` and its descendants out of the tree and returns them."""
        assert node.parent is not None
        del node.parent.children[node.key]
        removed = [node]
        for gone in removed:  # grows while it is walked
            removed += gone.children.values()
            gone.children = {}
            gone.parent = None
            gone.attached = False
            del self._by_page[gone.pages[0]]
            self._idle.pop(gone, None)
        return removed
