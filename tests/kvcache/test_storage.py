"""KVStorage: where a slot lies, and copies in order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rooftile.kvcache import PageCopy, group_layers, storage
from rooftile.kvcache.storage import KVStorage
from rooftile.types import KVSpec

WIDE = KVSpec(heads=3, k_dim=8, v_dim=4, dtype=torch.float32)
NARROW = KVSpec(heads=1, k_dim=2, v_dim=6, dtype=torch.bfloat16, window=16)


def make(page_size: int = 4) -> KVStorage:
    return KVStorage(group_layers([WIDE, NARROW, WIDE]), [5, 7], page_size)


def test_views_have_the_shapes_of_the_operators_and_one_heads_page_is_contiguous() -> None:
    kv = make(page_size=4)
    for layer, spec, num_pages in [(0, WIDE, 5), (1, NARROW, 7), (2, WIDE, 5)]:
        k, v = kv.layer(layer)
        assert k.shape == (num_pages, spec.heads, 4, spec.k_dim)
        assert v.shape == (num_pages, spec.heads, 4, spec.v_dim)
        assert k.dtype == v.dtype == spec.dtype
        assert k[0, 0].is_contiguous()
        assert v[0, 0].is_contiguous()
        page = spec.heads * 4 * (spec.k_dim + spec.v_dim)
        assert k.stride() == (page, 4 * spec.k_dim, spec.k_dim, 1)
        assert v.stride() == (page, 4 * spec.v_dim, spec.v_dim, 1)
        # The page's keys, then its values.
        assert v.data_ptr() - k.data_ptr() == spec.heads * 4 * spec.k_dim * spec.dtype.itemsize
    assert kv.nbytes == (2 * 5 * 3 * 12 * 4) * 4 + (7 * 8 * 4) * 2


def test_no_two_slots_overlap() -> None:
    kv = make()
    views = [view for layer in range(3) for view in kv.layer(layer)]
    for number, view in enumerate(views):
        view.fill_(number)
    for number, view in enumerate(views):
        assert bool((view == number).all())


def fill(kv: KVStorage) -> None:
    for layer in range(3):
        for half, view in enumerate(kv.layer(layer)):
            pages = torch.arange(view.shape[0]).view(-1, 1, 1, 1)
            view.copy_((100 * layer + 50 * half + pages).expand_as(view))


@pytest.mark.parametrize("buffer_bytes", [1, 1 << 20])
@given(
    moves=st.lists(
        st.tuples(st.integers(0, 1), st.integers(0, 4), st.integers(0, 4)).filter(
            lambda move: move[1] != move[2]
        ),
        max_size=8,
    )
)
def test_copies_are_as_if_one_after_the_other_in_all_layers(
    buffer_bytes: int, moves: list[tuple[int, int, int]]
) -> None:
    kv = make(page_size=2)
    fill(kv)
    pages = [list(range(5)), list(range(7))]
    for group, source, target in moves:
        pages[group][target] = pages[group][source]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "COPY_BUFFER_BYTES", buffer_bytes)
        kv.copy_pages([PageCopy(*move) for move in moves])
    for layer, group in [(0, 0), (1, 1), (2, 0)]:
        for half, view in enumerate(kv.layer(layer)):
            expected = 100 * layer + 50 * half + torch.tensor(pages[group]).view(-1, 1, 1, 1)
            assert torch.equal(view, expected.to(view.dtype).expand_as(view))


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"num_pages is \[5\] for 2 groups"):
        KVStorage(group_layers([WIDE, NARROW]), [5], 4)
    with pytest.raises(ValueError, match=r"num_pages is \[0\] for 1 groups"):
        KVStorage(group_layers([WIDE]), [0], 4)
