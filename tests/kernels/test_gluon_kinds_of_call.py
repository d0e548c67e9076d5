"""What is worked out once for a kind of call depends on nothing that two calls of a kind may differ in.

A launch made for fewer keys, say, has a table of pages that more keys do not fit into.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.gluon_sim import load_simulated

KERNEL, CONFIG, PAGED = load_simulated(
    "rooftile.kernels.gluon.attention.forward",
    "rooftile.kernels.gluon.attention.config",
    "rooftile.kernels.gluon.paged.forward",
)
Q, K, V = torch.zeros(20, 4, 64), torch.zeros(30, 2, 64), torch.zeros(30, 2, 64)
CU = torch.tensor([0, 20]), torch.tensor([0, 30])


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The arguments of every kind of call that was worked out."""
    made: list[tuple[Any, ...]] = []

    def bind(*arguments: Any) -> Any:
        made.append(arguments)
        return lambda *_: None

    monkeypatch.setattr(KERNEL, "_dense", {})
    monkeypatch.setattr(KERNEL, "_ragged", {})
    monkeypatch.setattr(PAGED, "_runs", {})
    monkeypatch.setattr(KERNEL, "bind_attention", bind)
    monkeypatch.setattr(KERNEL, "bind_attention_varlen", bind)
    monkeypatch.setattr(PAGED, "_kind_of_call", bind)
    return made


def wider(x: torch.Tensor) -> torch.Tensor:
    """The same values at other strides."""
    return torch.cat([x, x], -1)[..., : x.shape[-1]]


DENSE = {"q": Q[None], "k": K[None], "v": V[None], "sink": None, "left": -1, "right": 0, "softcap": 0.0,
         "scale": 0.1}  # fmt: skip
RAGGED = {"q": Q, "k": K, "v": V, "cu_seqlens_q": CU[0], "cu_seqlens_k": CU[1], "max_q_len": 9,
          "max_kv_len": 9, "sink": None, "left": -1, "right": 0, "softcap": 0.0, "scale": 0.1}  # fmt: skip
OTHER = {"sink": torch.zeros(4), "left": 5, "right": 1, "softcap": 2.0, "scale": 0.2, "max_q_len": 10,
         "max_kv_len": 10, "slopes": torch.zeros(4), "config": CONFIG.config_of(64, 64, 20, 0)}  # fmt: skip


@pytest.mark.parametrize("ragged", [False, True])
def test_attention(ragged: bool, bound: list[tuple[Any, ...]]) -> None:
    run, given = (KERNEL.attention_varlen, RAGGED) if ragged else (KERNEL.attention, DENSE)
    changed = [
        {**given, name: other} for name, other in OTHER.items() if ragged or "max" not in name
    ]
    changed += [{**given, name: wider(given[name])} for name in ("q", "k", "v")]  # type: ignore[arg-type]
    changed += [{**given, **{name: given[name].bfloat16() for name in ("q", "k", "v")}}]  # type: ignore[union-attr]
    if ragged:
        changed += [{**given, name: given[name].to(torch.int32)} for name in ("cu_seqlens_q", "cu_seqlens_k")]  # type: ignore[union-attr]  # fmt: skip
    for count, call in enumerate([given, *changed], start=1):
        for _ in range(2):
            run(**call)
            assert len(bound) == count


def test_pages(bound: list[tuple[Any, ...]]) -> None:
    spec = PAGED.SplitSpec(
        batch=1, tokens=20, max_q_len=20, max_kv_len=30, group_size=2, num_kv_heads=2, left=-1, right=0,
        kv_tile=64, tile_rows=(64,), tile_cost=(100,), item_cost=100, num_ctas=2, min_piece=1,
    )  # fmt: skip
    pages = torch.zeros(3, 2, 16, 64)
    given = {
        "q": Q, "k_pages": pages, "v_pages": pages, "cu_seqlens_q": CU[0], "kv_lens": CU[1][1:],
        "page_table": torch.zeros(1, 4, dtype=torch.int32), "max_q_len": 20, "max_kv_len": 30,
        "sink": None, "left": -1, "right": 0, "softcap": 0.0, "scale": 0.1, "k_scale": None,
        "v_scale": None, "batch_invariant": False, "plan": torch.zeros(500, dtype=torch.int32),
        "split": spec.numbers, "config": PAGED.config_of(64, 64, 8, False, False, 2),
    }  # fmt: skip
    eight_bits = pages.to(torch.float8_e4m3fn)
    changed = [
        {**given, "k_pages": eight_bits, "v_pages": eight_bits},
        {**given, "k_pages": wider(pages)},
        {**given, "v_pages": wider(pages)},
        {**given, "q": wider(Q)},
        {**given, "q": Q.bfloat16()},
        {**given, "page_table": torch.zeros(1, 5, dtype=torch.int32)},
        {**given, "split": PAGED.replace(spec, num_ctas=3).numbers},
        {**given, "config": PAGED.config_of(64, 64, 64, False, False, 2)},
        {**given, "with_lse": False},
        *({**given, name: OTHER[name]} for name in ("sink", "left", "right", "softcap", "scale")),
    ]
    for count, call in enumerate([given, *changed], start=1):
        for _ in range(2):
            PAGED.paged_attention(**call)
            assert len(bound) == count
    del given["config"]
    PAGED.paged_attention(**given)
    count = len(bound)
    PAGED.bind(**given)
    assert len(bound) == count
    PAGED.bind(**{**given, "with_lse": False})
    assert len(bound) == count + 1
