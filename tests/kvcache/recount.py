"""Recomputes every count of a KVCache from its live tables and its tree, and compares."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from rooftile.kvcache import NO_PAGE, KVCache, PageTable
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
        Counter(page for table in tables for page in table.pages[group] if page != NO_PAGE)
        for group in range(len(cache.num_pages))
    ]
    stats = cache.stats()
    for group, pool in enumerate(cache._pools):
        by_tree = Counter(node.pages[group] for node in nodes if node.pages[group] != NO_PAGE)
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
    windows = dict(cache._windows)
    full = [group for group in range(len(cache.num_pages)) if group not in windows]
    for node in nodes:
        assert node.attached
        assert len(node.key) == cache.page_size
        assert node.parent is not None
        assert node.depth == node.parent.depth + 1
        assert node.parent.children[node.key] is node
        assert all(node.pages[group] != NO_PAGE for group in full)
        assert node.children or max(node.pages) != NO_PAGE
    for group in [*windows, *full[:1]]:
        owned = {node.pages[group]: node for node in nodes if node.pages[group] != NO_PAGE}
        assert tree._owners[group] == owned
        only_the_trees = {node for page, node in owned.items() if not by_tables[group][page]}
        assert tree._loose[group].keys() == only_the_trees
    for group in full[:1]:
        # What no table refers to is loose in all groups, never pending, and queued last.
        unused = {node: place for place, node in enumerate(tree._loose[group])}
        for node, place in unused.items():
            assert node.step is None
            assert all(unused[child] < place for child in node.children.values())
            for other in windows:
                assert node.pages[other] == NO_PAGE or node in tree._loose[other]

    for table in tables:
        assert table.alive
        filled, partial = divmod(table.num_tokens, cache.page_size)
        for group, (column, trimmed) in enumerate(zip(table.pages, table.num_trimmed, strict=True)):
            assert len(column) == filled + bool(partial)
            assert column[:trimmed] == [NO_PAGE] * trimmed
            assert trimmed == 0 or (group in windows and trimmed <= filled)
            held = column[trimmed:]
            assert min(held, default=0) >= 0
            assert len(set(held)) == len(held)
        assert table.num_pages == sum(page != NO_PAGE for pages in table.pages for page in pages)
        if table.node is not None and table.node.attached:
            node = table.node
            while node.parent is not None:
                for group, column in enumerate(table.pages):
                    mine, the_trees = column[node.depth - 1], node.pages[group]
                    assert mine == the_trees or (group in windows and NO_PAGE in (mine, the_trees))
                node = node.parent
