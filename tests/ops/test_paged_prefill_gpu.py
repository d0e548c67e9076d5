"""Prefills over pages on a GPU, whose weights are taken under an anchored maximum."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from rooftile.ops.paged import paged_attention
from tests.ops.test_paged_gpu import Case, Shape, assert_close, make

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
SHAPES = [  # and keys of the longest request: up to 1024 tiles have fewer keys
    (Shape(), 1000),
    (Shape(page_size=64), 1024),
    (Shape(page_size=128, heads=(5, 1), sink=True), 900),
    (Shape(page_size=32, dims=(96, 96), options=(("window", (200, 0)),)), 1000),
    (Shape(page_size=8, heads=(6, 3), options=(("causal", False), ("softcap", 20.0))), 700),
    (Shape(dtype=torch.float16), 1024),
    (Shape(), 2100),
    (Shape(page_size=64, sink=True), 1300),
    (Shape(dims=(64, 64)), 1100),
    (Shape(dims=(64, 64), page_size=64, options=(("window", (300, 5)), ("causal", False))), 1100),
]


def let_keys_rise(case: Case) -> None:
    """Scores of early keys lie hundreds of natural units above those of the last ones."""
    size = case.k_pages.shape[2]
    pages = case.batch.page_table.cpu()
    for row, kv_len in zip(pages, case.batch.kv_lens.tolist(), strict=True):
        for key in range(0, kv_len - 140, 3):
            page = int(row[key // size])
            if page < len(case.k_pages):
                case.k_pages[page, :, key % size] *= 60.0


@pytest.mark.parametrize("rising", [False, True], ids=["", "rising"])
@pytest.mark.parametrize(("shape", "longest"), SHAPES, ids=str)
def test_prefills_of_all_lengths(shape: Shape, longest: int, rising: bool) -> None:
    lengths = [(longest, longest), (33, longest - 100), (1, 300), (0, 5), (150, 150), (40, 20)]
    case = make(shape, lengths, seed=longest, padding=2)
    case.batch = dataclasses.replace(case.batch, max_q_len=longest, max_kv_len=longest)
    if rising:
        let_keys_rise(case)
    got = case.run("gluon")
    assert_close(got, case.run("reference", torch.float64), case.run("reference"))
    tensors = (case.q, case.k_pages, case.v_pages, case.batch)
    unread = paged_attention(*tensors, kernel="gluon", **case.options)
    assert torch.equal(unread, got[0])  # type: ignore[arg-type]
