"""find_prefixes: which requests begin with the same pages, by what they say of themselves."""

from __future__ import annotations

from itertools import chain
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rooftile.ops.prefixes import FIND_PREFIXES, find_prefixes
from rooftile.types import PagedBatch
from tests.ops.accuracy import kernels_to_test

Requests = list[tuple[list[int], int, int]]  # pages, queries, keys in the last page
PAGES = st.lists(st.sampled_from([1, 1, 1, 2]), max_size=6)
REQUESTS = st.lists(st.tuples(PAGES, st.integers(0, 3), st.integers(1, 4)), max_size=9)


def made(requests: Requests, page: int = 4) -> PagedBatch:
    width = max([len(pages) for pages, _, _ in requests] + [1]) + 1
    table = torch.zeros(len(requests), width, dtype=torch.int32)  # unused entries are alike
    kv_lens = []
    for row, (pages, _, last) in zip(table, requests, strict=True):
        row[: len(pages)] = torch.tensor(pages, dtype=torch.int32)
        kv_lens.append((len(pages) - 1) * page + last if pages else 0)
    q_lens = [q for _, q, _ in requests]
    cu = torch.tensor([0, *q_lens]).cumsum(0).int()
    lens = torch.tensor(kv_lens, dtype=torch.int32)
    return PagedBatch(cu, lens, table, max([*q_lens, 1]), max([*kv_lens, 1]))


@pytest.mark.parametrize("kernel", kernels_to_test(FIND_PREFIXES))
@given(requests=REQUESTS, least=st.sampled_from([1, 4, 8, 9]))
def test_groups_are_whole_and_share_what_they_say(
    kernel: str, requests: Requests, least: int
) -> None:
    batch = made(requests)
    found = find_prefixes(batch, 4, min_keys=least, kernel=kernel)
    first, lens = found.first.tolist(), found.lens.tolist()
    count = len(requests)
    assert (len(first), len(lens)) == (count + 1, count)
    if count == 0:
        return
    assert first[0] == 0
    assert first[-1] == count
    assert first == sorted(first)
    q_lens = batch.cu_seqlens_q.diff().tolist()

    def common(i: int) -> int:
        """Pages that requests i - 1 and i have in common."""
        if not 0 < i < count:
            return 0
        most = [max(int(batch.kv_lens[r]) - q_lens[r], 0) // 4 for r in (i - 1, i)]
        pages = zip(requests[i - 1][0], requests[i][0], strict=False)
        same = [a == b for a, b in pages][: min(most)]
        return same.index(False) if False in same else len(same)

    for group, keys in enumerate(lens):
        members = range(first[group] + 1, first[group + 1])
        assert keys == min((4 * common(i) for i in members), default=0)
    begins = set(first)
    for i in range(1, count):
        apart = 4 * common(i) < least or 2 * common(i) < max(common(i - 1), common(i + 1))
        assert (i in begins) == apart


@pytest.mark.parametrize("kernel", kernels_to_test(FIND_PREFIXES))
def test_many_pages_and_prompts_of_their_own_under_one_system_prompt(kernel: str) -> None:
    system = list(range(700))
    prompts = [system + list(range(1000 * n, 1000 * n + 800)) for n in (1, 2, 3)]
    requests = [([*prompt, 10000 + i], 1, 2) for prompt in prompts for i in range(3)]
    found = find_prefixes(made(requests), 4, kernel=kernel)
    assert found.first.tolist() == [0, 3, 6, *[9] * 7]
    assert found.lens.tolist() == [6000, 6000, 6000, *[0] * 6]
    one = find_prefixes(made(requests[::3]), 4, kernel=kernel)
    assert one.first.tolist() == [0, 3, 3, 3]
    assert one.lens.tolist() == [2800, 0, 0]


@pytest.mark.skipif(
    "triton" not in kernels_to_test(FIND_PREFIXES), reason="it is interpreted apart"
)
@settings(max_examples=10)
@given(
    requests=st.lists(REQUESTS.filter(len), min_size=1, max_size=4), least=st.sampled_from([1, 8])
)
def test_more_requests_than_lanes(requests: list[Requests], least: int) -> None:
    """A group goes on from one round of lanes to the next."""
    from rooftile.kernels.triton import prefixes

    batch = made(list(chain(*requests)))
    want = find_prefixes(batch, 4, min_keys=least, kernel="reference")
    with mock.patch.object(prefixes, "LANES", (2,)):
        found = find_prefixes(batch, 4, min_keys=least, kernel="triton")
    assert torch.equal(found.first, want.first)
    assert torch.equal(found.lens, want.lens)


def test_refusals_name_the_value() -> None:
    batch = made([([1, 2], 1, 1)])
    for message, arguments in (
        ("page_size is 0", {"page_size": 0}),
        ("min_keys is 0", {"page_size": 4, "min_keys": 0}),
    ):
        with pytest.raises(ValueError, match=message):
            find_prefixes(batch, **arguments)  # type: ignore[arg-type]
    wide = PagedBatch(batch.cu_seqlens_q, batch.kv_lens, batch.page_table[0], 1, 8)
    with pytest.raises(ValueError, match=r"page_table has shape \[3\]"):
        find_prefixes(wide, 4)
