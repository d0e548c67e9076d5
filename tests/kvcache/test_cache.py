"""The rules of paged KV memory, one test a rule. Page size 4 unless a test says otherwise."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from rooftile.kvcache import KVCache, OutOfPages, PageCopy, PageTable
from tests.kvcache.recount import assert_consistent, tree_nodes

PROMPT = list(range(100, 112))  # three full pages


def make(num_pages: int = 16, page_size: int = 4, **options: bool) -> KVCache:
    return KVCache(1, [num_pages], page_size, **options)


def prefill(
    cache: KVCache, token_ids: Sequence[int], root: object = (), step: int | None = None
) -> PageTable:
    """Admits and publishes a whole sequence; ready at once unless `step` is given."""
    table = cache.admit(token_ids, root)
    cache.extend(table, len(token_ids))
    cache.publish(table, token_ids, 0 if step is None else step)
    if step is None:
        cache.complete(0)
    return table


def in_use(cache: KVCache) -> int:
    return cache.stats().in_use


# Sharing prefixes


def test_admission_shares_the_longest_run_of_full_pages() -> None:
    cache = make()
    first = prefill(cache, [*PROMPT, 1, 2])
    table = cache.admit([*PROMPT[:8], 7, 7, 7, 7, 7])
    assert table.pages[0] == first.pages[0][:2]
    assert table.num_tokens == table.num_cached == 8
    assert in_use(cache) == 4
    stats = cache.stats()
    assert stats.prefix_queries_tokens == 14 + 13
    assert stats.prefix_hit_tokens == 8
    assert stats.pages_shared_by_prefix == 2
    assert_consistent(cache, [first, table])


def test_a_prompt_may_be_cached_whole_and_admission_allocates_nothing() -> None:
    cache = make(num_pages=3)
    first = prefill(cache, PROMPT)
    table = cache.admit(PROMPT)
    assert table.num_tokens == len(PROMPT)
    assert table.pages == first.pages
    assert cache.extend(table, len(PROMPT)) == []
    assert cache.admit([9] * 100).pages == [[]]


def test_four_identical_prompts_in_one_step_take_one_prompts_pages() -> None:
    cache = make()
    tables = [prefill(cache, PROMPT, step=1) for _ in range(4)]
    assert all(table.pages == tables[0].pages for table in tables)
    assert [table.num_cached for table in tables] == [0, 12, 12, 12]
    assert in_use(cache) == 3
    cache.complete(1)
    for table in tables:
        cache.release(table)
    assert cache.stats().cached == 3


class Colliding(int):
    """Token ids whose hashes are all equal."""

    def __hash__(self) -> int:
        return 0


def test_a_hash_collision_never_serves_another_prompts_pages() -> None:
    cache = make()
    one, other = [[Colliding(10 * p + t) for t in range(8)] for p in (1, 2)]
    assert hash(tuple(one)) == hash(tuple(other))
    first = prefill(cache, one)
    second = prefill(cache, other)
    assert second.num_cached == 0
    assert not set(first.pages[0]) & set(second.pages[0])
    assert cache.admit(one).pages == first.pages
    assert cache.admit(other).pages == second.pages


def test_the_same_page_of_tokens_after_another_prefix_or_root_is_another_page() -> None:
    cache = make()
    prefill(cache, PROMPT, root=("salt", None))
    assert cache.admit(PROMPT).num_cached == 0
    assert cache.admit(PROMPT, root=("salt", "adapter")).num_cached == 0
    assert cache.admit(PROMPT[4:], root=("salt", None)).num_cached == 0
    assert cache.admit(PROMPT, root=("salt", None)).num_cached == 12


def test_a_partly_filled_page_is_never_shared_by_prefix() -> None:
    cache = make()
    prefill(cache, PROMPT[:7])
    assert cache.admit(PROMPT[:7]).num_cached == 4


def test_tokens_not_known_yet_keep_their_page_out_of_the_tree() -> None:
    cache = make()
    table = prefill(cache, PROMPT[:7])
    cache.extend(table, 8)  # room for a token that is sampled on the device
    cache.publish(table, PROMPT[:7], 1)
    assert cache.admit(PROMPT).num_cached == 4
    cache.publish(table, PROMPT[:8], 2)
    assert cache.admit(PROMPT).num_cached == 8


def test_match_more_adopts_what_others_have_published_since() -> None:
    cache = make()
    slow = prefill(cache, PROMPT[:4])
    fast = prefill(cache, [*PROMPT, 1])
    assert cache.match_more(slow, PROMPT) == 8
    assert slow.pages[0] == fast.pages[0][:3]
    assert slow.num_tokens == 12
    assert slow.num_cached == 0  # counted at admission
    assert cache.match_more(slow, PROMPT) == 0
    stats = cache.stats()
    assert (stats.prefix_hit_tokens, stats.pages_shared_by_prefix) == (4 + 8, 1 + 2)
    assert_consistent(cache, [slow, fast])


def test_match_more_needs_a_page_boundary_and_pages_that_are_the_trees() -> None:
    cache = make()
    inside = prefill(cache, PROMPT[:6])
    prefill(cache, PROMPT)
    assert cache.match_more(inside, PROMPT) == 0
    unpublished = cache.admit([5, *PROMPT])
    cache.extend(unpublished, 4)
    prefill(cache, [5, *PROMPT])
    assert cache.match_more(unpublished, [5, *PROMPT]) == 0


def test_what_was_computed_twice_in_parallel_stays_private() -> None:
    cache = make()
    one, two = cache.admit(PROMPT), cache.admit(PROMPT)
    for table in (one, two):
        cache.extend(table, 12)
        cache.publish(table, PROMPT, 1)
    cache.complete(1)
    assert not set(one.pages[0]) & set(two.pages[0])
    cache.extend(two, 16)
    cache.publish(two, [*PROMPT, 1, 2, 3, 4], 2)
    assert cache.admit([*PROMPT, 1, 2, 3, 4]).pages == one.pages
    before = cache.stats()
    cache.release(two)
    assert cache.stats().cached == before.cached  # its pages are free, not cached
    assert cache.stats().free == before.free + 4


def test_without_the_prefix_cache_only_forks_share() -> None:
    cache = make(prefix_cache=False)
    table = prefill(cache, PROMPT)
    other = prefill(cache, PROMPT)
    fork = cache.fork(table)
    assert other.num_cached == 0
    assert cache.match_more(other, PROMPT) == 0
    assert in_use(cache) == 6
    for alive in (table, other, fork):
        cache.release(alive)
    assert cache.stats().free == 16


# Pending pages and failed steps


def test_rollback_takes_pending_pages_from_the_tree_but_not_from_live_tables() -> None:
    cache = make()
    ready = prefill(cache, PROMPT[:4])
    failed = prefill(cache, PROMPT, step=5)
    sharer = cache.admit(PROMPT)
    assert sharer.num_cached == 12
    cache.rollback(5)
    fresh = cache.admit(PROMPT)
    assert fresh.num_cached == 4
    assert failed.num_tokens == sharer.num_tokens == 12
    assert_consistent(cache, [ready, failed, sharer, fresh])
    for table in (ready, failed, sharer, fresh):
        cache.release(table)
    assert (cache.stats().cached, cache.stats().free) == (1, 15)


def test_rollback_takes_what_later_steps_have_published_too() -> None:
    cache = make()
    table = prefill(cache, PROMPT[:8], step=1)
    cache.extend(table, 12)
    cache.publish(table, PROMPT, 2)  # a child of a page of step 1
    # The first page of this one is published under step 2, but step 1 wrote a part of it.
    other = prefill(cache, [1, 2, 3], step=1)
    cache.extend(other, 4)
    cache.publish(other, [1, 2, 3, 4], 2)
    assert len(tree_nodes(cache)) == 4
    cache.rollback(1)
    cache.complete(2)
    assert not tree_nodes(cache)
    cache.rollback(2)
    assert_consistent(cache, [table, other])


def test_earlier_steps_survive_a_rollback() -> None:
    cache = make()
    table = prefill(cache, PROMPT[:8], step=1)
    cache.extend(table, 12)
    cache.publish(table, PROMPT, 2)
    cache.rollback(2)
    cache.complete(1)
    assert cache.admit(PROMPT).num_cached == 8


def test_a_table_of_a_failed_step_does_not_publish_any_more() -> None:
    cache = make()
    table = prefill(cache, PROMPT[:8], step=1)
    fork = cache.fork(table)
    cache.rollback(1)
    for stale in (table, fork):
        cache.extend(stale, 12)
        cache.publish(stale, PROMPT, 2)
        assert cache.match_more(stale, [*PROMPT, *PROMPT]) == 0
    assert not tree_nodes(cache)
    assert_consistent(cache, [table, fork])


def test_a_pending_page_that_nobody_holds_is_dropped() -> None:
    """Its step may never be run with its table in it, so nobody may find it later."""
    cache = make()
    table = prefill(cache, PROMPT, step=1)
    cache.release(table)
    assert cache.stats().free == 16
    cache.complete(1)
    assert cache.admit(PROMPT).num_cached == 0


def test_a_pending_page_outlives_its_publisher_while_others_hold_it() -> None:
    cache = make()
    table = prefill(cache, PROMPT, step=1)
    sharer = cache.admit(PROMPT[:8])
    cache.release(table)
    cache.complete(1)
    cache.release(sharer)
    assert cache.admit(PROMPT).num_cached == 8


# Fork and copy-on-write


def test_a_fork_shares_every_page_and_copies_only_the_partly_filled_one_when_written() -> None:
    cache = make()
    table = prefill(cache, PROMPT[:10])
    forks = [cache.fork(table) for _ in range(3)]
    assert in_use(cache) == 3
    last = table.pages[0][-1]
    copies = [cache.extend(fork, 11) for fork in forks]
    assert copies == [[PageCopy(0, last, fork.pages[0][-1])] for fork in forks]
    assert len({fork.pages[0][-1] for fork in forks} | {last}) == 4
    assert all(fork.pages[0][:2] == table.pages[0][:2] for fork in forks)
    assert cache.extend(table, 11) == []  # the last sharer writes in place
    assert table.pages[0][-1] == last
    assert cache.stats().pages_copied == 3
    assert in_use(cache) == 6
    assert_consistent(cache, [table, *forks])


def test_the_source_of_a_fork_copies_too_and_the_fork_then_writes_in_place() -> None:
    cache = make()
    table = prefill(cache, PROMPT[:10])
    fork = cache.fork(table)
    (copy,) = cache.extend(table, 14)
    assert copy == PageCopy(0, fork.pages[0][-1], table.pages[0][-2])
    assert cache.extend(fork, 11) == []


def test_a_fork_at_a_page_boundary_copies_nothing() -> None:
    cache = make()
    table = prefill(cache, PROMPT)
    fork = cache.fork(table)
    assert cache.extend(fork, 13) == cache.extend(table, 13) == []
    assert fork.pages[0][3] != table.pages[0][3]


def test_both_sides_of_a_fork_may_publish_a_full_page_that_they_share() -> None:
    cache = make()
    table = prefill(cache, PROMPT[:4])
    cache.extend(table, 8)
    fork = cache.fork(table)
    cache.publish(table, PROMPT[:8], 1)
    cache.release(table)
    assert_consistent(cache, [fork])
    cache.publish(fork, PROMPT[:8], 2)
    cache.extend(fork, 12)
    cache.publish(fork, PROMPT, 2)
    cache.complete(1)
    cache.complete(2)
    assert cache.admit(PROMPT).pages == fork.pages


# Eviction


def cached_tokens(cache: KVCache) -> set[tuple[int, ...]]:
    return {tokens for _, tokens in tree_nodes(cache)}


def test_the_least_recently_used_leaf_goes_first_and_a_path_goes_from_its_end() -> None:
    cache = make(num_pages=6)
    for token in (1, 2):
        cache.release(prefill(cache, [token] * 12))
    cache.release(cache.admit([1] * 8))  # used again: its first two pages are young
    taker = cache.admit([])
    gone = []
    for num_tokens in range(4, 25, 4):
        before = cached_tokens(cache)
        cache.extend(taker, num_tokens)
        (tokens,) = before - cached_tokens(cache)
        gone.append((tokens[0], len(tokens) // 4))
    assert gone == [(1, 3), (2, 3), (2, 2), (2, 1), (1, 2), (1, 1)]


def test_a_shared_prefix_outlives_its_branches() -> None:
    cache = make(num_pages=4)
    branches = [[*PROMPT[:8], token, token, token, token] for token in (1, 2)]
    for table in [prefill(cache, branch) for branch in branches]:
        cache.release(table)
    taker = cache.admit([])
    cache.extend(taker, 8)
    assert cached_tokens(cache) == {tuple(PROMPT[:4]), tuple(PROMPT[:8])}


def test_a_page_that_a_live_table_refers_to_is_never_evicted() -> None:
    cache = make(num_pages=4)
    table = prefill(cache, PROMPT)
    taker = cache.admit([])
    cache.extend(taker, 4)
    with pytest.raises(OutOfPages):
        cache.extend(taker, 8)
    cache.release(cache.admit(PROMPT))  # a second user came and went
    with pytest.raises(OutOfPages):
        cache.extend(taker, 8)
    assert cache.admit(PROMPT).pages == table.pages


def test_extend_succeeds_exactly_when_free_and_cached_pages_suffice() -> None:
    cache = make(num_pages=5)
    cache.release(prefill(cache, PROMPT))
    table = cache.admit([7])
    cache.extend(table, 1)
    with pytest.raises(
        OutOfPages, match="5 pages are needed in KV group 0, which has 1 free and 3 cached of 5"
    ):
        cache.extend(table, 21)
    assert table.num_tokens == 1
    assert len(table.pages[0]) == 1
    assert cache.stats().pages_evicted == 0
    assert cache.admit(PROMPT).num_cached == 12


def test_extend_takes_the_last_page() -> None:
    cache = make(num_pages=5)
    cache.release(prefill(cache, PROMPT))
    table = cache.admit([7])
    cache.extend(table, 20)
    assert cache.stats().free == cache.stats().cached == 0
    assert cache.stats().pages_evicted == 3


def test_the_copied_page_counts_as_room_too() -> None:
    cache = make(num_pages=3)
    table = prefill(cache, PROMPT[:6])
    fork = cache.fork(table)
    with pytest.raises(OutOfPages, match="2 pages are needed"):
        cache.extend(fork, 9)
    assert fork.pages == table.pages
    assert cache.stats().pages_copied == 0
    assert len(cache.extend(fork, 8)) == 1


def test_used_up_salts_leave_nothing_behind() -> None:
    cache = make(num_pages=3)
    for salt in range(50):
        cache.release(prefill(cache, PROMPT, root=salt))
    cache.admit(PROMPT, root="never seen")
    assert len(cache._tree._roots) == 1


def test_reset_prefix_empties_the_tree_and_leaves_live_tables_alone() -> None:
    cache = make()
    cache.release(prefill(cache, [1] * 8))
    table = prefill(cache, PROMPT)
    unpublished = cache.admit([3] * 4)
    cache.extend(unpublished, 4)
    cache.reset_prefix()
    assert (cache.stats().cached, in_use(cache)) == (0, 4)
    for stale, tokens in ((table, [*PROMPT, 1, 2, 3, 4]), (unpublished, [3] * 4)):
        cache.extend(stale, len(tokens))
        cache.publish(stale, tokens, 1)  # computed before the reset: not for anybody else
    assert not tree_nodes(cache)
    assert_consistent(cache, [table, unpublished])
    again = prefill(cache, PROMPT)
    assert again.num_cached == 0
    assert cache.admit(PROMPT).num_cached == 12


# Groups


def test_a_table_has_pages_in_every_group_and_a_leaf_frees_all_of_its() -> None:
    cache = KVCache(2, [4, 9], 4)
    cache.release(prefill(cache, PROMPT))
    table = prefill(cache, [1] * 8)  # group 0 has one free page and must evict one leaf
    stats = cache.stats()
    assert [group.free for group in stats.groups] == [0, 5]
    assert [group.cached for group in stats.groups] == [2, 2]
    assert stats.pages_evicted == 2
    assert [len(column) for column in table.pages] == [2, 2]
    assert_consistent(cache, [table])
    assert cache.admit(PROMPT).num_cached == 8


def test_copies_name_their_group() -> None:
    cache = KVCache(2, [8, 8], 4)
    table = prefill(cache, PROMPT[:6])
    fork = cache.fork(table)
    before = [column[-1] for column in fork.pages]
    assert cache.extend(fork, 7) == [
        PageCopy(group, before[group], fork.pages[group][-1]) for group in (0, 1)
    ]
    assert cache.stats().pages_copied == 2


def test_the_shortest_group_decides() -> None:
    cache = KVCache(2, [9, 2], 4)
    table = cache.admit([])
    with pytest.raises(OutOfPages, match="3 pages are needed in KV group 1, which has 2 free"):
        cache.extend(table, 12)
    assert table.pages == [[], []]


# Misuse


def test_a_released_table_is_refused() -> None:
    cache = make()
    table = prefill(cache, PROMPT)
    cache.release(table)
    for call in (
        lambda: cache.release(table),
        lambda: cache.extend(table, 1),
        lambda: cache.publish(table, PROMPT, 1),
        lambda: cache.match_more(table, PROMPT),
        lambda: cache.fork(table),
    ):
        with pytest.raises(ValueError, match="has been released"):
            call()
    assert "released" in repr(table)


def test_refusals_name_the_value_and_what_is_allowed() -> None:
    for page_size in (0, -4, 3, 512):
        with pytest.raises(
            ValueError, match=f"page_size is {page_size}; .* power of two from 1 to 256"
        ):
            make(page_size=page_size)
    for page_size in (1, 2, 256):
        make(page_size=page_size)
    with pytest.raises(ValueError, match=r"num_pages is \[8\] for num_groups=2"):
        KVCache(2, [8], 4)
    with pytest.raises(ValueError, match="num_pages is 0"):
        KVCache(1, [0], 4)
    cache = make()
    table = prefill(cache, PROMPT)
    with pytest.raises(ValueError, match="num_tokens is 3 but the table has 12 already"):
        cache.extend(table, 3)
