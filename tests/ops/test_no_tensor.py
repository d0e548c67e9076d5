"""What is no tensor is refused by name wherever an operator takes one, and so are a tangent and a
kernel that does not exist.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

from rooftile import ops
from rooftile.types import PagedBatch

DENSE, RAGGED = torch.randn(1, 4, 2, 64), torch.randn(4, 2, 64)
ROWS, PAGES = torch.randn(4, 64), torch.randn(3, 2, 16, 64)
LENGTHS, SLOTS = torch.tensor([0, 4], dtype=torch.int32), torch.arange(4)
BATCH = PagedBatch(LENGTHS, LENGTHS[1:], torch.zeros(1, 1, dtype=torch.int32), 4, 4)
TABLE = ops.rotary_table(ops.RotaryConfig(64, 10000.0), 8)
CALLS: dict[Callable[..., Any], dict[str, Any]] = {
    ops.attention: {"q": DENSE, "k": DENSE, "v": DENSE},
    ops.attention_varlen: {
        "q": RAGGED, "k": RAGGED, "v": RAGGED, "cu_seqlens_q": LENGTHS, "cu_seqlens_k": LENGTHS,
    },
    ops.paged_attention: {"q": RAGGED, "k_pages": PAGES, "v_pages": PAGES, "batch": BATCH},
    ops.append_kv: {
        "k": RAGGED, "v": RAGGED, "k_pages": PAGES, "v_pages": PAGES, "slots": SLOTS,
    },
    ops.dual_chunk_attention: {
        "q_intra": DENSE, "q_succ": DENSE, "q_inter": DENSE, "k": DENSE, "v": DENSE,
        "chunk_size": 3, "local_size": 1,
    },
    ops.dual_chunk_attention_varlen: {
        "q_intra": RAGGED, "q_succ": RAGGED, "q_inter": RAGGED, "k": RAGGED, "v": RAGGED,
        "cu_seqlens_q": LENGTHS, "cu_seqlens_k": LENGTHS, "chunk_size": 3, "local_size": 1,
    },
    ops.paged_dual_chunk_attention: {
        "q_intra": RAGGED, "q_succ": RAGGED, "q_inter": RAGGED, "k_pages": PAGES, "v_pages": PAGES,
        "batch": BATCH, "chunk_size": 3, "local_size": 1,
    },
    ops.dual_chunk_rotary_embedding: {
        "q": RAGGED, "positions": SLOTS, "cos_sin": TABLE, "chunk_size": 3, "local_size": 1,
    },
    ops.differential_attention: {
        "q1": DENSE, "k1": DENSE, "q2": DENSE, "k2": DENSE, "v": DENSE, "lam": DENSE[0, 0, :, 0],
    },
    ops.differential_attention_varlen: {
        "q1": RAGGED, "k1": RAGGED, "q2": RAGGED, "k2": RAGGED, "v": RAGGED, "lam": DENSE[0, 0, :, 0],
        "cu_seqlens_q": LENGTHS, "cu_seqlens_k": LENGTHS,
    },
    ops.paged_differential_attention: {
        "q1": RAGGED, "q2": RAGGED, "k_pages": PAGES, "v_pages": PAGES, "batch": BATCH,
        "lam": DENSE[0, 0, :, 0],
    },
    ops.merge_attention_states: {"outs": DENSE, "lses": DENSE[..., 0]},
    ops.rotary_embedding: {"x": RAGGED, "positions": SLOTS, "cos_sin": TABLE},
    ops.rms_norm: {"x": ROWS, "weight": None, "eps": 1e-5},
    ops.silu_and_mul: {"x": ROWS},
    ops.linear: {"x": ROWS, "weight": ROWS},
    ops.pack: {"weight": ROWS, "format": "int8"},
    ops.matmul: {"a": ROWS, "b": ROWS.T},
    ops.top_logprobs: {"logits": ROWS, "k": 3},
    ops.tree_attention: {
        "q": RAGGED, "k_pages": PAGES, "v_pages": PAGES, "batch": BATCH, "tree": SLOTS,
    },
    ops.plan_paged_attention: {"q": RAGGED, "k_pages": PAGES, "v_pages": PAGES, "batch": BATCH},
    ops.find_prefixes: {"batch": BATCH, "page_size": 16},
    ops.grouped_linear: {"x": ROWS, "weight": ROWS[None], "group_sizes": LENGTHS[1:]},
    ops.gelu_and_mul: {"x": ROWS},
    ops.sample: {"logits": ROWS},
    ops.token_ranks: {"logits": ROWS, "token_ids": SLOTS},
}  # fmt: skip


@pytest.mark.parametrize("operator", CALLS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("given", [None, "x"])
def test_what_is_no_tensor_is_named(operator: Callable[..., Any], given: Any) -> None:
    arguments = CALLS[operator]
    operator(**arguments)
    for name, value in arguments.items():
        optional = name == "k2" and given is None
        if isinstance(value, torch.Tensor) and not optional:
            with pytest.raises(ValueError, match=f"{name} is {given!r}"):
                operator(**{**arguments, name: given})


@pytest.mark.parametrize("operator", CALLS, ids=lambda f: f.__name__)
def test_forward_mode_derivatives_are_refused(operator: Callable[..., Any]) -> None:
    """Torch would leave them out of the result without a word."""
    arguments = CALLS[operator]
    with forward_ad.dual_level():
        operator(**arguments)
        for name, value in arguments.items():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                dual = forward_ad.make_dual(value, value)
                with pytest.raises(NotImplementedError, match=f"{name} has a tangent.*backward"):
                    operator(**{**arguments, name: dual})


def test_every_operator_is_here() -> None:
    functions = [getattr(ops, name) for name in ops.__all__]
    assert {f for f in functions if inspect.isfunction(f) and "kernel" in _options(f)} <= {*CALLS}


def _options(operator: Callable[..., Any]) -> Any:
    return inspect.signature(operator).parameters


@pytest.mark.parametrize("kernel", [None, 1, [], b"auto", "nonsense"])
def test_a_kernel_that_does_not_exist_is_named(kernel: Any) -> None:
    identity = ops.score_mod(None, reference=lambda score, batch, head, i, j: score)()
    for operator, arguments in CALLS.items():
        if "kernel" not in _options(operator):
            continue
        variants: list[dict[str, Any]] = [{}]
        if "score_mod" in _options(operator):
            slopes = torch.ones(2)
            variants += [{"score_mod": identity}, {"alibi_slopes": slopes}]
            variants += [{"alibi_slopes": slopes.clone().requires_grad_()}]
        for options in variants:
            with pytest.raises(
                ValueError, match=rf"kernel={re.escape(repr(kernel))} does not.*'reference'"
            ):
                operator(**arguments, **options, kernel=kernel)


@pytest.mark.parametrize("field", ["cu_seqlens_q", "kv_lens", "page_table", "prefix", "batch"])
def test_a_field_of_a_batch_that_is_something_else_is_named(field: str) -> None:
    changed: dict[str, Any] = {field: "x"}
    wrong = "x" if field == "batch" else replace(BATCH, **changed)
    for operator, arguments in CALLS.items():
        shares = operator in (ops.paged_attention, ops.plan_paged_attention)
        if "batch" not in arguments or (field == "prefix" and not shares):
            continue
        with pytest.raises(ValueError, match=f"{field} is 'x'"):
            operator(**{**arguments, "batch": wrong})


DIFFERENTIABLE = {
    *(ops.attention, ops.attention_varlen, ops.differential_attention),
    *(ops.differential_attention_varlen, ops.merge_attention_states, ops.rms_norm, ops.linear),
    *(ops.silu_and_mul, ops.gelu_and_mul, ops.matmul, ops.pack),
}


def test_a_gradient_that_would_be_lost_is_refused() -> None:
    scale, fp8 = torch.ones(2), torch.float8_e4m3fn
    pages = {"k_pages": PAGES.to(fp8), "v_pages": PAGES.to(fp8)}
    more: dict[Callable[..., Any], dict[str, Any]] = {
        ops.paged_attention: {"sink": scale, "k_scale": scale, "v_scale": scale, **pages},
        ops.tree_attention: {"sink": scale, "k_scale": scale, "v_scale": scale, **pages},
        ops.append_kv: {
            "k_scale": scale, "v_scale": scale, "cos_sin": TABLE, "positions": SLOTS, **pages,
        },
        ops.matmul: {
            "a": ROWS.to(fp8), "b": ROWS.T.to(fp8), "scale_a": scale[0], "scale_b": scale[0],
        },
    }  # fmt: skip
    for operator, arguments in CALLS.items():
        given = {**arguments, **more.get(operator, {})}
        if operator is ops.plan_paged_attention:  # of tensors it reads shapes alone
            continue
        for name, value in given.items():
            differentiable = operator in DIFFERENTIABLE and not name.startswith("scale_")
            if differentiable or not isinstance(value, torch.Tensor) or value.itemsize < 4:
                continue
            if not value.is_floating_point() or (name == "x" and operator is ops.rotary_embedding):
                continue
            wanted = {**given, name: value.clone().requires_grad_()}
            with pytest.raises(NotImplementedError, match=f"{name} requires a gradient"):
                operator(**wanted)
            with torch.no_grad():
                operator(**wanted)


@pytest.mark.parametrize("flag", ["causal", "interleaved", "batch_invariant"])
@pytest.mark.parametrize("value", ["no", None, 0.5, torch.tensor(True)], ids=repr)
def test_a_flag_that_is_neither_true_nor_false_is_named(flag: str, value: Any) -> None:
    for operator, arguments in CALLS.items():
        if flag in _options(operator):
            with pytest.raises(ValueError, match=f"{flag} is .*; it must be True or False"):
                operator(**arguments, **{flag: value})


@pytest.mark.parametrize("pages", ["k_pages", "v_pages"])
@pytest.mark.parametrize("shape", [(1, 2, 16, 64), (3, 1, 16, 64), (3, 2, 1, 64), (3, 2, 16, 1)])
def test_pages_that_lie_in_one_place_are_not_written(pages: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=f"{pages} is expanded.*pages of their own"):
        ops.append_kv(**{**CALLS[ops.append_kv], pages: torch.zeros(shape).expand(PAGES.shape)})


def test_an_array_is_named_on_one_line() -> None:
    with pytest.raises(ValueError, match=r"^attention: q is array\(\[.*; it must be a tensor$"):
        ops.attention(DENSE.numpy(), DENSE, DENSE)  # type: ignore[arg-type]
