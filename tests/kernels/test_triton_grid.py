"""Grids with more programs than a GPU's second axis holds, in Triton's interpreter on a CPU: kernels give
what they give otherwise when that axis is short.

The interpreter is chosen when a kernel is imported, so this needs a process of its own:
TRITON_INTERPRET=1 python -m pytest tests/kernels/test_triton_grid.py
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rooftile import ops

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1, in a process of its own", allow_module_level=True)
pytest.importorskip("triton", reason="Triton is not installed")

from rooftile.kernels.triton import differential, grid

CU = torch.tensor([0, 3, 3, 4, 40, 41, 45])  # tokens after the last are padding
TABLE = ops.rotary_table(ops.RotaryConfig(4, 10000.0), 64)


def attend(operator: Callable[..., Any], queries: int, ragged: bool, **options: Any) -> Tensor:
    """Five query heads over one of keys, 8 dims."""
    shape = (50,) if ragged else (7, 6)
    q = torch.randn(queries, *shape, 5, 8)
    k, v = torch.randn(2, *shape, 1, 8)
    lengths = (CU, CU) if ragged else ()
    keys = (q[0], k, q[1], k, v, torch.rand(5)) if "diff" in operator.__name__ else (*q, k, v)
    out, *_ = operator(*keys, *lengths, return_lse=True, kernel="triton", **options)
    assert isinstance(out, Tensor)
    return out


def appended() -> Tensor:
    pages = torch.zeros(2, 3, 9, 4, 2048)
    k, v = torch.randn(2, 5, 9, 2048)
    slots = torch.tensor([3, -1, 8, 0, 11])
    ops.append_kv(k, v, pages[0], pages[1], slots, kernel="triton")
    return pages


CASES: dict[str, Callable[[], Tensor]] = {
    "dense": lambda: attend(ops.attention, 1, False, causal=True),
    "ragged": lambda: attend(ops.attention_varlen, 1, True, window=(3, 2)),
    "dual chunk": lambda: attend(ops.dual_chunk_attention, 3, False, chunk_size=5, local_size=2),
    "dual chunk, ragged": lambda: attend(
        ops.dual_chunk_attention_varlen, 3, True, chunk_size=5, local_size=2
    ),
    "differential": lambda: attend(ops.differential_attention, 2, False),
    "differential, ragged": lambda: attend(ops.differential_attention_varlen, 2, True),
    "append": appended,
    "rotary": lambda: ops.rotary_embedding(
        torch.randn(4, 4100, 4), torch.arange(4), TABLE, kernel="triton"
    ),
    "dual chunk rotary": lambda: ops.dual_chunk_rotary_embedding(
        *(torch.randn(4, 4100, 4), torch.arange(4), TABLE),
        chunk_size=9,
        local_size=2,
        kernel="triton",
    )[2],
    "gated": lambda: ops.silu_and_mul(torch.randn(3, 8300), kernel="triton"),
    "stacked": lambda: differential.stack_queries(
        torch.randn(3, 5, 2048), torch.randn(3, 5, 2048), False
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_long_second_axis(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    expected = CASES[name]()
    monkeypatch.setattr(grid, "LONGEST", 2)
    torch.manual_seed(0)
    assert torch.equal(CASES[name](), expected)


@pytest.mark.parametrize("second", [0, 1, 65_535, 65_536, 70_000, 10**6, 2**31 - 1])
def test_every_program_has_a_place(second: int) -> None:
    first, columns, rounds = grid.grid_of(7, second)
    assert first == 7
    assert columns <= 65_535
    assert rounds <= 65_535
    assert second <= columns * rounds < second + max(rounds, 1)


def far_apart(shape: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
    """Random values in memory of more than 2^31 elements, of which only these are touched."""
    storage = torch.empty(2**31 + 2**27, dtype=torch.float16)
    return storage.as_strided(shape, stride).copy_(torch.randn(shape))


def test_heads_that_lie_beyond_32_bits_are_rotated() -> None:
    x, positions = far_apart((2, 65, 16), (16, 2**25, 1)), torch.tensor([3, 9])
    got = ops.rotary_embedding(x, positions, TABLE, kernel="triton")
    expected = ops.rotary_embedding(x.contiguous(), positions, TABLE, kernel="reference")
    torch.testing.assert_close(got, expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("far", ["x", "weight"])
def test_columns_that_lie_beyond_32_bits_are_multiplied(far: str) -> None:
    x, weight = torch.randn(2, 66).half(), torch.randn(2, 8, 66).half()
    if far == "x":
        x = far_apart((2, 66), (33, 2**25))
    else:
        weight = far_apart((2, 8, 66), (8, 16, 2**25))
    sizes = torch.tensor([1, 1])
    got = ops.grouped_linear(x, weight, sizes, kernel="triton")
    expected = ops.grouped_linear(x.contiguous(), weight.contiguous(), sizes, kernel="reference")
    torch.testing.assert_close(got, expected, rtol=2e-3, atol=2e-2)
