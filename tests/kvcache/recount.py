"""Recomputes every count of a KVCache from its live tables and its tree, and compares."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from rooftile.kvcache import KVCache, PageTable
from rooftile.kvcache.prefix import Node


def tree_nodes(cache: KVCache) -> dict[tuple[object, tuple[int, ...]], Node]:
    """(root, all tokens up to the end of the node's page) -> node, by walking from the roots."""
    found = {}
    stack = [(key, (), root) for key, root in cache._tree._roots.items()]
    while stack:
        key, tokens, node = stack.pop()
        for child in node.children.values():
            found[key, tokens + child.key] = child
            stack.append((key, tokens + child.key, child))
    return found


def assert_consistent(cache: KVCache, tables: Iterable[PageTable]) -> None:
    """tables: every live table of the cache."""
    tables = list(tables)
    nodes = list(tree_nodes(cache).values())
    by_tables = [
        Counter(page for table in tables for page in table.pages[group])
        for group in range(len(cache.num_pages))
    ]
    stats = cache.stats()
    for group, pool in enumerate(cache._pools):
        by_tree = Counter(node.pages[group] for node in nodes)
        assert max(by_tree.values(), default=0) <= 1
        counts = [by_tables[group][page] + by_tree[page] for page in range(pool.num_pages)]
        assert [pool.refcount(page) for page in range(pool.num_pages)] == counts
        assert sorted(pool._free) == [page for page, count in enumerate(counts) if count == 0]
        shown = stats.groups[group]
        assert shown.total == cache.num_pages[group]
        assert shown.free == counts.count(0)
        assert shown.in_use == len(by_tables[group])
        assert shown.cached == len(by_tree.keys() - by_tables[group].keys())
        assert shown.free + shown.cached + shown.in_use == shown.total
    for name in ("total", "free", "cached", "in_use"):
        assert getattr(stats, name) == sum(getattr(group, name) for group in stats.groups)

    tree = cache._tree
    assert sorted(tree._by_page) == sorted(node.pages[0] for node in nodes)
    for node in nodes:
        assert tree.owner(node.pages[0]) is node
        assert node.attached
        assert len(node.key) == cache.page_size
        assert node.parent is not None
        assert node.depth == node.parent.depth + 1
        assert node.parent.children[node.key] is node
    # Idle is exactly what no table refers to: never a pending node, descendants queued first.
    idle = {node: place for place, node in enumerate(tree._idle)}
    assert idle.keys() == {node for node in nodes if not by_tables[0][node.pages[0]]}
    for node, place in idle.items():
        assert node.step is None
        assert all(idle[child] < place for child in node.children.values())

    for table in tables:
        assert table.alive
        full, partial = divmod(table.num_tokens, cache.page_size)
        for column in table.pages:
            assert len(column) == full + bool(partial)
            assert len(set(column)) == len(column)
        if table.node is not None and table.node.attached:
            node = table.node
            while node.parent is not None:
                assert node.pages == tuple(column[node.depth - 1] for column in table.pages)
                node = node.parent
