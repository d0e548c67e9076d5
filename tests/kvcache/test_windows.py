"""KV groups with a window: pages come back, stay cached one by one, and match where they suffice.

Page size 4 unless a test says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from rooftile.kvcache import NO_PAGE, KVCache, OutOfPages, PageTable
from tests.kvcache.recount import assert_consistent, tree_nodes

PROMPT = list(range(100, 124))  # six full pages
FULL, WINDOW = 0, 1


def make(
    window: int = 5, num_pages: Sequence[int] = (16, 16), page_size: int = 4, **options: bool
) -> KVCache:
    """A full group, and one with a window."""
    return KVCache(2, num_pages, page_size, windows=[None, window], **options)


def make_windowed(window: int = 5, num_pages: int = 16, **options: bool) -> KVCache:
    return KVCache(1, [num_pages], 4, windows=[window], **options)


def compute(
    cache: KVCache, table: PageTable, token_ids: Sequence[int], chunk: int, step: int = 0
) -> PageTable:
    """Prefills in chunks, each a step of its own that is ready at once."""
    while table.num_tokens < len(token_ids):
        cache.trim(table, table.num_tokens)
        cache.extend(table, min(table.num_tokens + chunk, len(token_ids)))
        cache.publish(table, token_ids, step)
        cache.complete(step)
    return table


def prefill(
    cache: KVCache, token_ids: Sequence[int], chunk: int = 4, root: object = ()
) -> PageTable:
    return compute(cache, cache.admit(token_ids, root), token_ids, chunk)


def admit_unread(cache: KVCache) -> PageTable:
    """A table that reads nothing from the cache, but will publish (for scores of a prompt)."""
    return cache.admit([])


def hollow(cache: KVCache, *numbers: int) -> None:
    """The window group loses pages of PROMPT's path, as if evicted in this order."""
    nodes = tree_nodes(cache)
    for number in numbers:
        node = nodes[(), tuple(PROMPT[: 4 * number + 4])]
        cache._drop(cache._tree._hollow(node, len(cache.num_pages) - 1))


# Giving pages back


@pytest.mark.parametrize("window", [0, 1, 3, 4, 5, 11, 100])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("chunk", [1, 3, 8])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_long_sequence_holds_its_window_and_its_chunk(
    window: int, page_size: int, chunk: int, prefix_cache: bool
) -> None:
    cache = make(window, (256, 256), page_size, prefix_cache=prefix_cache)
    table = cache.admit([])
    for start in range(0, 240, chunk):
        cache.trim(table, start)
        end = start + chunk
        cache.extend(table, end)
        cache.publish(table, list(range(end)), 1)
        full, held = cache.stats().groups
        assert full.in_use == -(-end // page_size)
        first_page = max(0, start - window) // page_size
        assert held.in_use == -(-end // page_size) - first_page
        # The bound that users are told: the window, the chunk, and less than a page on each side.
        assert (held.in_use - 2) * page_size < window + chunk
        cache.complete(1)
    assert_consistent(cache, [table])


def test_a_page_comes_back_once_its_last_token_is_out_of_sight() -> None:
    cache = make(window=5, prefix_cache=False)
    table = prefill(cache, PROMPT[:12], chunk=12)
    before = list(table.pages[WINDOW])
    for first, trimmed in [(0, 0), (8, 0), (9, 1), (12, 1), (9, 1)]:
        cache.trim(table, first)
        assert table.num_trimmed == [0, trimmed]
        assert table.pages[WINDOW] == [NO_PAGE] * trimmed + before[trimmed:]
    assert cache.stats().groups[WINDOW].free == 16 - 2
    assert cache._pools[WINDOW].refcount(before[0]) == 0
    assert NO_PAGE not in table.pages[FULL]
    assert table.num_pages == 3 + 2
    cache.extend(table, 16)
    assert table.pages[WINDOW][-1] == before[0]  # the page freed last is handed out first


def test_a_partly_filled_page_is_never_given_back() -> None:
    cache = make(window=0)
    table = prefill(cache, PROMPT[:6])
    cache.trim(table, 6)
    assert table.num_trimmed == [0, 1]
    cache.extend(table, 8)
    cache.trim(table, 8)
    assert table.num_trimmed == [0, 2]
    assert cache.stats().groups[WINDOW].in_use == 0
    cache.extend(table, 9)
    assert_consistent(cache, [table])


def test_a_fork_shares_what_is_left_and_lets_go_by_itself() -> None:
    cache = make(window=5)
    table = prefill(cache, PROMPT[:10], chunk=10)
    cache.trim(table, 10)
    fork = cache.fork(table)
    assert fork.num_trimmed == [0, 1]
    assert fork.num_trimmed is not table.num_trimmed
    second = table.pages[WINDOW][1]
    (full, window) = cache.extend(fork, 14)
    assert (full.group, window.group) == (FULL, WINDOW)  # copy on write, in both groups
    cache.trim(fork, 14)
    assert fork.num_trimmed == [0, 2]
    assert cache._pools[WINDOW].refcount(second) == 2  # `table` and the tree
    assert cache.extend(table, 13) == []
    assert_consistent(cache, [table, fork])
    cache.release(fork)
    assert table.pages[WINDOW][1] == second
    cache.release(table)
    assert cache.stats().in_use == 0


# What the tree keeps


def test_a_page_out_of_sight_stays_cached_and_is_found_again() -> None:
    cache = make(window=5)
    table = prefill(cache, PROMPT)
    assert cache.stats().groups[WINDOW].cached == 3  # keys from 20 - 5 on are in sight
    again = cache.admit(PROMPT[:12])
    assert again.num_cached == 12
    # Token 11 may be computed again and sees keys from 6 on.
    assert again.num_trimmed == [0, 1]
    assert cache.stats().groups[WINDOW].cached == 1
    assert cache.stats().pages_shared_by_prefix == 3 + 2
    assert cache.stats().prefix_hit_tokens == 12
    assert_consistent(cache, [table, again])


def test_the_longest_prefix_whose_end_sees_all_its_pages_matches() -> None:
    """A match of d pages needs the pages of keys 4 * d - 1 - window to 4 * d - 1."""
    for window, gone, matched in [
        (5, [], 6), (5, [0], 6), (5, [3], 6), (5, [4], 4), (5, [5], 5), (5, [5, 3], 3),
        (5, [5, 4], 4), (5, [2, 4], 2), (5, [1, 3, 5], 1), (5, [0, 2, 4], 0),
        (5, [0, 1, 2, 3], 6), (5, [0, 1, 2, 3, 4, 5], 0),
        (0, [4], 6), (3, [4], 6), (4, [4], 4), (7, [3], 6), (8, [3], 3), (19, [0], 6), (20, [0], 0),
        (100, [0], 0), (100, [5], 5),
    ]:  # fmt: skip
        cache = make(window)
        cache.release(prefill(cache, PROMPT))
        hollow(cache, *gone)
        table = cache.admit(PROMPT)
        assert table.num_cached == 4 * matched, (window, gone)
        assert_consistent(cache, [table])


def test_the_last_token_of_a_prompt_that_is_cached_whole_can_be_computed_again() -> None:
    for window, held in [(0, 1), (3, 1), (4, 2), (7, 2), (8, 3)]:
        cache = make(window)
        cache.release(prefill(cache, PROMPT))
        table = cache.admit(PROMPT)
        assert table.num_tokens == 24
        cache.trim(table, 23)
        assert table.num_trimmed == [0, 6 - held]


def test_match_more_gives_back_what_the_adopted_tokens_do_not_see() -> None:
    cache = make(window=5)
    slow = prefill(cache, PROMPT[:8], chunk=8)
    fast = prefill(cache, PROMPT)
    assert slow.num_trimmed == [0, 0]
    assert cache.match_more(slow, PROMPT) == 16
    assert slow.num_trimmed == [0, 4]
    assert slow.pages[WINDOW] == [NO_PAGE] * 4 + fast.pages[WINDOW][4:]
    assert slow.pages[FULL] == fast.pages[FULL]
    assert_consistent(cache, [slow, fast])


def test_match_more_stands_on_pages_that_the_table_holds() -> None:
    cache = make(window=9)
    slow = prefill(cache, PROMPT[:8], chunk=8)
    fast = prefill(cache, PROMPT[:12])
    assert cache.match_more(slow, PROMPT) == 4  # keys from 2 on: its own two pages and one more
    assert slow.num_trimmed == [0, 0]
    assert_consistent(cache, [slow, fast])


# Evicting


def test_a_page_that_only_the_tree_holds_is_evicted_by_itself_oldest_first() -> None:
    cache = make(window=5, num_pages=(32, 6))
    table = prefill(cache, PROMPT)  # holds the last three in sight, pages 0 to 2 are loose
    taken = cache.admit([])
    for end, missing in [(4, 1), (8, 2), (12, 3)]:
        cache.extend(taken, end)
        nodes = tree_nodes(cache)
        gone = [nodes[(), tuple(PROMPT[:end])].pages[WINDOW] for end in range(4, 25, 4)]
        assert [page == NO_PAGE for page in gone] == [True] * missing + [False] * (6 - missing)
        assert_consistent(cache, [table, taken])
    assert cache.stats().pages_evicted == 3
    with pytest.raises(
        OutOfPages, match="1 pages are needed in KV group 1, which has 0 free and 0 cached of 6"
    ):
        cache.extend(taken, 13)
    assert [len(column) for column in taken.pages] == [3, 3]
    assert len(tree_nodes(cache)) == 6  # hollow, but the full group still has them all
    assert cache.admit(PROMPT).num_cached == 24


def test_pages_that_are_used_again_are_young_again() -> None:
    cache = make(window=5, num_pages=(32, 8))
    table = prefill(cache, PROMPT)
    cache.release(cache.admit(PROMPT[:8]))  # pages 0 and 1 were held once more
    taken = cache.admit([])
    cache.extend(taken, 12)  # two free pages, and the oldest loose one
    nodes = tree_nodes(cache)
    assert nodes[(), tuple(PROMPT[:12])].pages[WINDOW] == NO_PAGE
    assert cache.admit(PROMPT[:8]).num_cached == 8
    assert table.alive


def test_evicting_a_leaf_of_the_full_group_takes_its_window_page_along() -> None:
    cache = make(window=5, num_pages=(6, 16))
    cache.release(prefill(cache, PROMPT))
    hollow(cache, 5)
    taken = cache.admit([])
    cache.extend(taken, 8)
    assert [group.cached for group in cache.stats().groups] == [4, 4]
    assert cache.stats().pages_evicted == 3  # of the last leaf one, of the next both
    assert_consistent(cache, [taken])


def test_room_is_made_in_each_group_by_what_it_has() -> None:
    """Window pages that a leaf of the full group has freed are not evicted again."""
    cache = make(window=5, num_pages=(6, 6))
    cache.release(prefill(cache, PROMPT))  # window pages were let go in the order 0 1 2 5 4 3
    table = cache.admit([])
    cache.extend(table, 8)
    assert cache.stats().pages_evicted == 4
    assert cache.admit(PROMPT).num_cached == 16


def test_nothing_is_evicted_where_one_group_does_not_suffice() -> None:
    cache = make(window=5, num_pages=(5, 9))
    held = prefill(cache, PROMPT[:16])
    other = cache.admit([])
    before = cache.stats()
    with pytest.raises(OutOfPages, match="KV group 0, which has 1 free and 0 cached of 5"):
        cache.extend(other, 8)
    assert cache.stats() == before
    assert before.groups[WINDOW].cached == 1
    assert_consistent(cache, [held, other])


# Without a full group


def test_a_node_is_gone_with_its_last_page_and_child() -> None:
    cache = make_windowed(window=5, num_pages=7)
    for salt in range(20):
        cache.release(prefill(cache, PROMPT, root=salt))
        assert cache.stats().in_use == 0
    table = cache.admit([])
    cache.extend(table, 7 * 4)
    assert not tree_nodes(cache)
    assert len(cache._tree._roots) <= 1
    assert_consistent(cache, [table])


def test_without_a_full_group_a_sequence_may_be_longer_than_all_memory() -> None:
    cache = make_windowed(window=5, num_pages=4)
    tokens = list(range(400))
    table = prefill(cache, tokens)
    assert cache.stats().groups[0].in_use == 3
    cache.release(table)
    again = cache.admit(tokens)
    assert again.num_cached == 400
    assert [page for page in again.pages[0] if page != NO_PAGE] == again.pages[0][-2:]


# Tokens computed anew


@pytest.mark.parametrize("windows", [[5], [None, 5], [None], [7, 5]])
def test_unused_nodes_take_the_pages_of_whoever_had_to_compute_them_anew(
    windows: list[int | None],
) -> None:
    cache = KVCache(len(windows), [32] * len(windows), 4, windows=windows)
    cache.release(prefill(cache, PROMPT[:20]))
    if windows[-1] is not None:
        hollow(cache, 0, 1, 2, 3, 4)
        assert cache.admit(PROMPT).num_cached == 0
    table = compute(cache, admit_unread(cache), PROMPT, chunk=8)
    assert table.node is not None
    assert table.node.depth == 6
    assert_consistent(cache, [table])
    assert cache.admit(PROMPT).num_cached == 24
    assert cache.stats().cached + cache.stats().in_use <= 6 * len(windows)


def test_nodes_in_use_keep_their_pages() -> None:
    cache = make(window=5)
    long = prefill(cache, PROMPT)
    hollow(cache, 0, 1, 2)
    table = cache.admit(PROMPT[:8])
    assert table.num_cached == 0
    compute(cache, table, PROMPT[:8], chunk=8)
    assert table.node is None
    assert_consistent(cache, [long, table])
    cache.release(table)
    assert cache.admit(PROMPT).pages[FULL] == long.pages[FULL]


def test_without_a_full_group_pages_in_use_stay_too() -> None:
    cache = make_windowed(window=5, num_pages=32)
    long = prefill(cache, PROMPT)  # holds pages 3 to 5
    table = compute(cache, admit_unread(cache), PROMPT, chunk=8)
    assert table.node is None
    nodes = tree_nodes(cache)
    the_trees = [nodes[(), tuple(PROMPT[:end])].pages[0] for end in range(4, 25, 4)]
    assert the_trees[3:] == long.pages[0][3:]
    assert_consistent(cache, [long, table])


def test_pages_that_are_gone_take_no_place() -> None:
    cache = make(window=1)
    cache.release(prefill(cache, PROMPT[:12]))
    table = admit_unread(cache)
    cache.extend(table, 12)
    cache.trim(table, 12)
    cache.publish(table, PROMPT[:12], 1)
    assert table.node is None
    assert cache.admit(PROMPT[:8]).num_cached == 8


def test_pending_nodes_keep_their_pages() -> None:
    cache = make_windowed(window=1)
    one, two = admit_unread(cache), admit_unread(cache)
    cache.extend(one, 12)
    cache.publish(one, PROMPT[:12], 1)
    cache.trim(one, 12)
    cache.extend(two, 12)
    cache.publish(two, PROMPT[:12], 2)
    assert two.node is None
    cache.rollback(2)
    cache.complete(1)
    assert cache.admit(PROMPT[:12]).num_cached == 12
    assert len(tree_nodes(cache)) == 3


@pytest.mark.parametrize("failed", [True, False])
def test_renewed_nodes_are_pending_until_their_step_is_complete(failed: bool) -> None:
    """They leave with a failed step, and with a table whose step may never run."""
    cache = make(window=5)
    cache.release(prefill(cache, PROMPT))
    hollow(cache, 0, 1, 2, 3, 4, 5)
    table = cache.admit(PROMPT)
    cache.extend(table, 24)
    cache.publish(table, PROMPT, 7)
    if failed:
        cache.rollback(7)
        assert_consistent(cache, [table])
    else:
        cache.release(table)
    assert not tree_nodes(cache)


# Steps in flight


def test_a_page_out_of_sight_before_its_step_is_complete_stays_cached() -> None:
    """A long chunk passes its own window; the next step is scheduled while it is in flight."""
    cache = make(window=5)
    table = cache.admit(PROMPT)
    cache.extend(table, 20)
    cache.publish(table, PROMPT, 1)
    cache.trim(table, 20)
    assert cache.stats().groups[WINDOW].cached == 3
    cache.extend(table, 24)
    cache.publish(table, PROMPT, 2)
    cache.complete(1)
    cache.complete(2)
    assert cache.admit(PROMPT[:8]).num_cached == 8


@pytest.mark.parametrize("windows", [[5], [None, 5]])
def test_a_failed_step_takes_pages_out_of_sight_along(windows: list[int | None]) -> None:
    cache = KVCache(len(windows), [16] * len(windows), 4, windows=windows)
    table = cache.admit(PROMPT)
    cache.extend(table, 20)
    cache.publish(table, PROMPT, 1)
    cache.trim(table, 20)
    cache.rollback(1)
    assert cache.stats().cached == 0
    assert_consistent(cache, [table])
    cache.release(table)
    assert cache.stats().free == 16 * len(windows)


@pytest.mark.parametrize("windows", [[5], [None, 5], [5, None], [2, 5]])
def test_pending_pages_of_a_released_table_are_dropped(windows: list[int | None]) -> None:
    cache = KVCache(len(windows), [16] * len(windows), 4, windows=windows)
    table = cache.admit(PROMPT)
    cache.extend(table, 20)
    cache.publish(table, PROMPT, 1)
    cache.release(table)
    assert cache.stats().cached == 0
    assert not tree_nodes(cache)


def test_pages_given_back_before_their_tokens_are_known_make_hollow_nodes() -> None:
    cache = make(window=1)
    table = cache.admit(PROMPT)
    cache.extend(table, 12)
    cache.trim(table, 12)
    cache.publish(table, PROMPT[:12], 1)
    cache.complete(1)
    pages = [node.pages[WINDOW] for node in tree_nodes(cache).values()]
    assert [page == NO_PAGE for page in pages] == [True, True, False]
    assert cache.admit(PROMPT[:8]).num_cached == 0
    other = cache.admit(PROMPT)
    assert other.num_cached == 12
    assert_consistent(cache, [table, other])


def test_a_fork_may_publish_what_its_sibling_has_lost() -> None:
    cache = make(window=1)
    table = cache.admit(PROMPT)
    cache.extend(table, 12)
    fork = cache.fork(table)
    cache.trim(table, 12)
    for each in (table, fork):
        cache.publish(each, PROMPT[:12], 1)
        assert each.node is not None
        assert each.node.depth == 3
    assert_consistent(cache, [table, fork])
    cache.release(table)
    cache.complete(1)
    cache.release(fork)
    assert cache.stats().in_use == 0


def test_a_node_without_any_page_is_not_made() -> None:
    cache = make_windowed(window=1)
    table = cache.admit(PROMPT)
    cache.extend(table, 12)
    cache.trim(table, 12)
    cache.publish(table, PROMPT[:12], 1)
    assert not tree_nodes(cache)
    assert table.node is None


# Misuse


def test_refusals() -> None:
    for windows in ([5], [5, -1], [None, 5, 5]):
        with pytest.raises(ValueError, match=r"windows is \[.*\] for num_groups=2"):
            KVCache(2, [4, 4], 4, windows=windows)
    cache = make()
    table = prefill(cache, PROMPT[:8])
    with pytest.raises(ValueError, match="trim: first is 9 but the table has 8 tokens"):
        cache.trim(table, 9)
    cache.release(table)
    with pytest.raises(ValueError, match="has been released"):
        cache.trim(table, 0)
