"""Lengths that change from call to call: one compiled program takes them all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from rooftile import ops
from rooftile.types import PagedBatch

# None equals another size of the arguments, which torch would take for the same size for ever.
LENGTHS = (11, 14, 19)


def cu(*ends: int) -> Tensor:
    return torch.tensor([0, *ends], dtype=torch.int32)


def heads(length: int) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.randn(2, length, 4, 8),
        torch.randn(2, length + 2, 2, 8),
        torch.randn(2, length + 2, 2, 8),
    )


def attend(length: int) -> tuple[Tensor, ...]:
    return tuple(x[0] for x in heads(length))


def paged(q: Tensor, k_pages: Tensor, cu_q: Tensor, most: int) -> Tensor:
    kv_lens, table = cu(6)[1:], torch.tensor([[1, 0, 2]], dtype=torch.int32)
    batch = PagedBatch(cu_q, kv_lens, table, most, 12)
    return ops.paged_attention(q, k_pages, k_pages, batch)  # type: ignore[return-value]


def append(k: Tensor, pages: Tensor, slots: Tensor) -> Tensor:
    ops.append_kv(k, k, pages, pages.clone(), slots)
    return pages + 0


def drawn(logits: Tensor, rows: Tensor) -> Tensor:
    temperature = torch.ones_like(logits[:, 0])
    tensors = ops.SamplingTensors(temperature=temperature, seeds=rows, position=rows)
    return ops.sample(logits, tensors).token_ids


CASES: dict[str, tuple[Callable[..., Any], Callable[[int], tuple[Any, ...]]]] = {
    "attention": (lambda q, k, v: ops.attention(q, k, v, causal=True, return_lse=True), heads),
    "attention_variants": (
        lambda q, k, v: ops.attention(q, k, v, window=(3, 1), softcap=2.0, softmax_scale=0.2),
        heads,
    ),
    "attention_varlen": (
        lambda q, k, v, cu_q, cu_k: ops.attention_varlen(q, k, v, cu_q, cu_k, causal=True),
        lambda n: (*attend(n), cu(1, n), cu(2, n + 2)),
    ),
    "paged_attention": (
        paged,
        lambda n: (torch.randn(n, 4, 8), torch.randn(4, 2, 4, 8), cu(n), n),
    ),
    "append_kv": (
        append,
        lambda n: (torch.randn(n, 2, 8), torch.zeros(5, 2, 4, 8), torch.arange(n)),
    ),
    "merge_attention_states": (
        ops.merge_attention_states,
        lambda n: (torch.randn(2, n, 4, 8), torch.randn(2, n, 4)),
    ),
    "linear": (ops.linear, lambda n: (torch.randn(n, 8), torch.ones(6, 8), torch.ones(6))),
    "rms_norm": (
        lambda x, weight: ops.rms_norm(x, weight, residual=x),
        lambda n: (torch.randn(n, 8), torch.ones(8)),
    ),
    "rotary_embedding": (
        ops.rotary_embedding,
        lambda n: (torch.randn(n, 2, 8), torch.arange(n), torch.randn(20, 2, 4)),
    ),
    "silu_and_mul": (ops.silu_and_mul, lambda n: (torch.randn(n, 8),)),
    "sample": (drawn, lambda n: (torch.randn(n, 9), torch.arange(n))),
    "top_logprobs": (lambda logits: ops.top_logprobs(logits, 3), lambda n: (torch.randn(n, 9),)),
}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("case", CASES)
def test_one_program_for_all_lengths(case: str) -> None:
    function, arguments = CASES[case]
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in LENGTHS:
            given = arguments(length)
            again = [x.clone() if isinstance(x, Tensor) else x for x in given]
            torch.testing.assert_close(compiled(*given), function(*again))


def test_lengths_become_dynamic_by_themselves() -> None:
    compiled = torch.compile(
        lambda q, k, v: ops.attention(q, k, v, causal=True), fullgraph=True, backend="aot_eager"
    )
    for length in LENGTHS:
        given = heads(length)
        torch.testing.assert_close(compiled(*given), ops.attention(*given, causal=True))


def test_gradients_of_changing_lengths() -> None:
    compiled = torch.compile(
        lambda q, k, v: ops.attention(q, k, v, causal=True),
        fullgraph=True, dynamic=True, backend="aot_eager",
    )  # fmt: skip
    for length in LENGTHS:
        given = [x.requires_grad_() for x in heads(length)]
        found = torch.autograd.grad(compiled(*given).sum(), given)
        expected = torch.autograd.grad(ops.attention(*given, causal=True).sum(), given)  # type: ignore[union-attr]
        torch.testing.assert_close(found, expected)
