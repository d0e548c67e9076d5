"""Differential attention (Ye et al. 2024, arXiv 2410.05258, eq. 1) over dense, ragged and paged keys.

Query heads come in pairs whose softmaxes are subtracted: out = (A1 - lam A2) V. In its second
version both queries of a pair meet the same keys, and lam is a number for each token and pair.
The pair of a query goes with the pair of keys that its group has, as in the original flash code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rooftile.ops.attention import AttentionCall
from rooftile.ops.attention_check import (
    Window,
    check_cu_seqlens,
    check_heads,
    check_options,
    check_qkv,
)
from rooftile.ops.check import (
    check_device,
    check_float,
    check_same,
    check_shape,
    is_finite,
    refuse_gradient,
    require,
)
from rooftile.ops.operator import GPU_FAMILIES, Operator
from rooftile.ops.paged import make_plan, no_plan
from rooftile.ops.paged_check import check_batch, check_pages
from rooftile.types import AttentionPlan, PagedBatch

Result = Tensor | tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class DifferentialCall:
    """The static properties that choose a kernel."""

    device: str
    dtype: torch.dtype
    num_q_pairs: int
    num_kv_pairs: int
    k_dim: int  # of one key
    v_dim: int
    left: int  # window, -1: unbounded
    right: int
    shared_keys: bool
    page_size: int = 0  # 0: not paged


def differential_attention(
    q1: Tensor,  # [batch, q_len, num_q_pairs, k_dim]
    k1: Tensor,  # [batch, kv_len, num_kv_pairs, k_dim]
    q2: Tensor,  # the shape of q1
    k2: Tensor | None,  # the shape of k1; None: k1
    v: Tensor,  # [batch, kv_len, num_kv_pairs, v_dim]
    lam: Tensor | float,  # a number, [num_q_pairs], or [batch, q_len, num_q_pairs]
    *,
    causal: bool = False,
    window: Window | None = None,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    kernel: str = "auto",
) -> Result:
    """attention(q1, k1, v) - lam * attention(q2, k2, v), both softmaxes over one stream of values.

    `causal`, `window`, `softmax_scale` and float64 are as in `attention`; rows that see nothing
    give 0. `k2=None` is the second version, whose lam is sigmoid(x W) for each token. Heads that
    are interleaved (0 and 1 a pair) are q[..., 0::2, :] and q[..., 1::2, :], views both.
    Differentiable in every tensor, through both lse too.

    Args:
        q1: [batch, q_len, num_q_pairs, k_dim]
        k1: [batch, kv_len, num_kv_pairs, k_dim]
        q2: the shape of q1
        k2: the shape of k1; None: k1
        v: [batch, kv_len, num_kv_pairs, v_dim]
        lam: a number, [num_q_pairs], or [batch, q_len, num_q_pairs]

    Returns:
        out [batch, q_len, num_q_pairs, v_dim] in q1's dtype; with `return_lse` also lse1 and lse2
        [batch, q_len, num_q_pairs], natural logarithm, float32 (float64 for float64 inputs).

    Raises:
        ValueError: shapes, dtypes, devices or options that do not fit together.
        NotImplementedError: an explicitly chosen kernel that cannot run the call.
    """
    name = "differential_attention"
    check_qkv(name, q1, k1, v, "[batch, length, heads, dim]", 4, "q1", "k1")
    require(
        q1.shape[0] == k1.shape[0],
        lambda: (
            f"{name}: q1 has batch {q1.shape[0]} but k1 has batch {k1.shape[0]}; make them equal"
        ),
    )
    lam = _check_pairs(name, q1, k1, q2, k2, lam)
    left, right, scale = check_options(name, q1, causal, window, 0.0, None, softmax_scale)
    out, lse1, lse2 = DIFFERENTIAL.handle(q1, k1, q2, k2, v, lam, left, right, scale, kernel)
    return (out, lse1, lse2) if return_lse else out


def differential_attention_varlen(
    q1: Tensor,  # [tokens_q, num_q_pairs, k_dim]
    k1: Tensor,  # [tokens_k, num_kv_pairs, k_dim]
    q2: Tensor,  # the shape of q1
    k2: Tensor | None,  # the shape of k1; None: k1
    v: Tensor,  # [tokens_k, num_kv_pairs, v_dim]
    lam: Tensor | float,  # a number, [num_q_pairs], or [tokens_q, num_q_pairs]
    cu_seqlens_q: Tensor,  # [batch + 1] int32 or int64
    cu_seqlens_k: Tensor,  # [batch + 1] int32 or int64
    *,
    max_q_len: int | None = None,
    max_kv_len: int | None = None,
    causal: bool = False,
    window: Window | None = None,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    kernel: str = "auto",
) -> Result:
    """`differential_attention` over sequences of different lengths, laid end to end.

    Lengths, maxima and padding are as in `attention_varlen`. Differentiable.

    Args:
        q1: [tokens_q, num_q_pairs, k_dim]
        k1: [tokens_k, num_kv_pairs, k_dim]
        q2: the shape of q1
        k2: the shape of k1; None: k1
        v: [tokens_k, num_kv_pairs, v_dim]
        lam: a number, [num_q_pairs], or [tokens_q, num_q_pairs]
        cu_seqlens_q: [batch + 1] int32 or int64
        cu_seqlens_k: [batch + 1] int32 or int64

    Returns:
        out [tokens_q, num_q_pairs, v_dim]; with `return_lse` also lse1 and lse2
        [tokens_q, num_q_pairs].

    Raises:
        ValueError, NotImplementedError: as `differential_attention` and `attention_varlen`.
    """
    name = "differential_attention_varlen"
    check_qkv(name, q1, k1, v, "[tokens, heads, dim]", 3, "q1", "k1")
    lam = _check_pairs(name, q1, k1, q2, k2, lam)
    left, right, scale = check_options(name, q1, causal, window, 0.0, None, softmax_scale)
    max_q_len = q1.shape[0] if max_q_len is None else max_q_len
    max_kv_len = k1.shape[0] if max_kv_len is None else max_kv_len
    check_cu_seqlens(name, "cu_seqlens_q", cu_seqlens_q, "q1", q1, max_q_len, "max_q_len")
    check_cu_seqlens(name, "cu_seqlens_k", cu_seqlens_k, "k1", k1, max_kv_len, "max_kv_len")
    check_shape(name, "cu_seqlens_k", cu_seqlens_k, tuple(cu_seqlens_q.shape), "[batch + 1]")
    out, lse1, lse2 = DIFFERENTIAL_VARLEN.handle(
        *(q1, k1, q2, k2, v, lam, cu_seqlens_q, cu_seqlens_k, max_q_len, max_kv_len),
        *(left, right, scale, kernel),
    )
    return (out, lse1, lse2) if return_lse else out


def paged_differential_attention(
    q1: Tensor,  # [tokens, num_q_pairs, k_dim]
    q2: Tensor,  # the shape of q1
    k_pages: Tensor,  # [num_pages, num_kv_pairs, page_size, 2 * k_dim], or k_dim
    v_pages: Tensor,  # [num_pages, num_kv_pairs, page_size, v_dim]
    batch: PagedBatch,
    lam: Tensor | float,  # a number, [num_q_pairs], or [tokens, num_q_pairs]
    *,
    causal: bool = True,
    window: Window | None = None,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    kernel: str = "auto",
) -> Result:
    """`differential_attention` over pages: prefill, decode and any mixture, as `paged_attention`.

    A slot holds both keys of a pair, k1 then k2, so that a page is read once for both softmaxes;
    where it holds k_dim numbers, both queries meet the same key. Not differentiable.

    Args:
        q1: [tokens, num_q_pairs, k_dim]
        q2: the shape of q1
        k_pages: [num_pages, num_kv_pairs, page_size, 2 * k_dim], or k_dim
        v_pages: [num_pages, num_kv_pairs, page_size, v_dim]
        lam: a number, [num_q_pairs], or [tokens, num_q_pairs]

    Returns:
        out [tokens, num_q_pairs, v_dim]; with `return_lse` also lse1 and lse2 [tokens, num_q_pairs].

    Raises:
        ValueError: as `differential_attention` and `paged_attention`.
        NotImplementedError: inputs that require a gradient; a kernel that cannot run the call.
    """
    name = "paged_differential_attention"
    check_pages(name, q1, "q1", k_pages, v_pages, takes_scales=False)
    require(
        q1.shape[-1] > 0 and k_pages.shape[-1] in (q1.shape[-1], 2 * q1.shape[-1]),
        lambda: (
            f"{name}: q1 has dim {q1.shape[-1]} and k_pages has dim {k_pages.shape[-1]}; a slot must "
            f"hold both keys of a pair ({2 * q1.shape[-1]}), or one that they share ({q1.shape[-1]})"
        ),
    )
    check_heads(name, q1.shape[1], k_pages.shape[1])
    lam = _check_queries(name, q1, q2, lam)
    remedy = "use differential_attention_varlen, or "
    refuse_gradient(name, remedy, q1=q1, q2=q2, k_pages=k_pages, v_pages=v_pages, lam=lam)
    left, right, scale = check_options(name, q1, causal, window, 0.0, None, softmax_scale)
    check_batch(name, q1, k_pages, batch, left, "q1")
    out, lse1, lse2 = PAGED_DIFFERENTIAL.handle(
        *(q1, q2, k_pages, v_pages, lam, batch.cu_seqlens_q, batch.kv_lens, batch.page_table),
        *(batch.max_q_len, batch.max_kv_len, left, right, scale, None, [], kernel),
    )
    return (out, lse1, lse2) if return_lse else out


def _check_pairs(
    name: str, q1: Tensor, k1: Tensor, q2: Tensor, k2: Tensor | None, lam: Tensor | float
) -> Tensor:
    if k2 is not None:
        check_same(name, k1=k1, k2=k2)
        check_shape(name, "k2", k2, tuple(k1.shape), "the shape of k1")
    return _check_queries(name, q1, q2, lam)


def _check_queries(name: str, q1: Tensor, q2: Tensor, lam: Tensor | float) -> Tensor:
    """lam as private operators take it: [num_q_pairs], or one for each token and pair."""
    check_same(name, q1=q1, q2=q2)
    check_shape(name, "q2", q2, tuple(q1.shape), "the shape of q1")
    if not isinstance(lam, Tensor):
        require(
            is_finite(lam),
            lambda: f"{name}: lam is {lam!r:.80}; give a finite number or a tensor",
        )
        lam = q1.new_full((), lam, dtype=torch.float32 if q1.dtype != torch.float64 else None)
    check_float(name, lam=lam)
    check_device(name, q1=q1, lam=lam)
    pairs = q1.shape[-2]
    require(
        tuple(lam.shape) in ((), (pairs,), tuple(q1.shape[:-1])),
        lambda: (
            f"{name}: lam has shape {list(lam.shape)}; expected a number, [num_q_pairs] = [{pairs}], "
            f"or one for each query, {list(q1.shape[:-1])}"
        ),
    )
    return lam.expand(pairs) if lam.dim() == 0 else lam


def _fake(q1: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.float64 if q1.dtype == torch.float64 else torch.float32
    lse1, lse2 = (q1.new_empty(q1.shape[:-1], dtype=dtype) for _ in range(2))
    return q1.new_empty(*q1.shape[:-1], v.shape[-1]), lse1, lse2


def _fake_backward(
    q1: Tensor, k1: Tensor, q2: Tensor, k2: Tensor | None, v: Tensor, lam: Tensor, *_: Any
) -> tuple[Tensor, ...]:
    grad_k2 = k1.new_empty(0) if k2 is None else k2.new_empty(k2.shape)
    like = (q1, k1, q2, v, lam)
    grad_q1, grad_k1, grad_q2, grad_v, grad_lam = (x.new_empty(x.shape) for x in like)
    return grad_q1, grad_k1, grad_q2, grad_k2, grad_v, grad_lam


def _call(
    q1: Tensor, k1: Tensor, q2: Tensor, k2: Tensor | None, v: Tensor, lam: Tensor, *rest: Any
) -> DifferentialCall:
    *_, left, right, _ = rest
    return DifferentialCall(
        *(q1.device.type, q1.dtype, q1.shape[-2], k1.shape[-2], q1.shape[-1], v.shape[-1]),
        *(left, right),
        shared_keys=k2 is None,
    )


def differential_call(
    q1: Tensor, k_pages: Tensor, v_pages: Tensor, left: int, right: int
) -> DifferentialCall:
    """Of attention over pages."""
    return DifferentialCall(
        *(q1.device.type, q1.dtype, q1.shape[1], k_pages.shape[1], q1.shape[2], v_pages.shape[3]),
        *(left, right),
        shared_keys=k_pages.shape[3] == q1.shape[2],
        page_size=k_pages.shape[2],
    )


def plan_differential(
    call: DifferentialCall, batch: PagedBatch, tokens: int, kernel: str = "auto"
) -> tuple[PagedBatch, AttentionPlan]:
    """A step's plan, which is that of plain attention by both queries of each pair."""
    family = PAGED_DIFFERENTIAL.choose(call, kernel)
    if family not in GPU_FAMILIES:
        return batch, no_plan(family, batch)
    keys = call.k_dim if call.shared_keys else 2 * call.k_dim
    stacked = AttentionCall(
        *(call.device, call.dtype, 2 * call.num_q_pairs, call.num_kv_pairs, keys, call.v_dim),
        *(call.left, call.right),
        has_softcap=False,
        has_sink=False,
        page_size=call.page_size,
    )
    return batch, make_plan(stacked, batch, tokens, family)


_TENSORS = "Tensor q1, Tensor k1, Tensor q2, Tensor? k2, Tensor v, Tensor lam"
_LENGTHS = "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_q_len, SymInt max_kv_len"
_SAVED = "Tensor lse1, Tensor lse2, Tensor grad_out, Tensor grad_lse1, Tensor grad_lse2"
_OPTIONS = "int left, int right, float scale"
_RESULTS = "(Tensor, Tensor, Tensor)"
_GRADIENTS = "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"

DIFFERENTIAL = Operator(
    "differential_attention",
    f"({_TENSORS}, {_OPTIONS}) -> {_RESULTS}",
    module="differential",
    families=("gluon", "triton", "torch", "reference"),
    call=_call,
    fake=lambda q1, k1, q2, k2, v, *_: _fake(q1, v),
)

DIFFERENTIAL_BACKWARD = Operator(
    "differential_attention_backward",
    f"({_TENSORS}, {_SAVED}, {_OPTIONS}) -> {_GRADIENTS}",
    module="differential",
    families=("reference",),
    call=_call,
    fake=_fake_backward,
).record_kernels()

DIFFERENTIAL_VARLEN = Operator(
    "differential_attention_varlen",
    f"({_TENSORS}, {_LENGTHS}, {_OPTIONS}) -> {_RESULTS}",
    module="differential",
    families=("gluon", "triton", "torch", "reference"),
    call=_call,
    fake=lambda q1, k1, q2, k2, v, *_: _fake(q1, v),
)

DIFFERENTIAL_VARLEN_BACKWARD = Operator(
    "differential_attention_varlen_backward",
    f"({_TENSORS}, {_LENGTHS}, {_SAVED}, {_OPTIONS}) -> {_GRADIENTS}",
    module="differential",
    families=("reference",),
    call=_call,
    fake=_fake_backward,
).record_kernels()

PAGED_DIFFERENTIAL = Operator(
    "paged_differential_attention",
    "(Tensor q1, Tensor q2, Tensor k_pages, Tensor v_pages, Tensor lam, Tensor cu_seqlens_q,"
    " Tensor kv_lens, Tensor page_table, SymInt max_q_len, SymInt max_kv_len,"
    f" {_OPTIONS}, Tensor? plan, SymInt[] split) -> {_RESULTS}",
    module="differential",
    families=("gluon", "triton", "cpu", "torch", "reference"),
    call=lambda q1, q2, k_pages, v_pages, lam, *rest: differential_call(
        q1, k_pages, v_pages, *rest[-5:-3]
    ),
    fake=lambda q1, q2, k_pages, v_pages, *_: _fake(q1, v_pages),
)


def _register_backward(forward: Operator, backward: Operator, lengths: int) -> None:
    """Arguments are the six tensors, `lengths` lengths, three options and the kernel."""

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        tensors, rest = inputs[:6], inputs[6:-1]
        ctx.sizes = [x for x in rest[:lengths] if not isinstance(x, Tensor)]
        ctx.options = rest[lengths:]
        cu_seqlens = [x for x in rest[:lengths] if isinstance(x, Tensor)]
        ctx.save_for_backward(*tensors, *cu_seqlens, *output[1:])

    def run_backward(
        ctx: Any, grad_out: Tensor, grad_lse1: Tensor, grad_lse2: Tensor
    ) -> tuple[Any, ...]:
        *tensors, lse1, lse2 = ctx.saved_tensors
        grads = backward.handle(
            *(*tensors, *ctx.sizes, lse1, lse2, grad_out, grad_lse1, grad_lse2),
            *(*ctx.options, "auto"),
        )
        grad_q1, grad_k1, grad_q2, grad_k2, grad_v, grad_lam = grads
        given = (grad_q1, grad_k1, grad_q2, None if tensors[3] is None else grad_k2)
        return (*given, grad_v, grad_lam, *[None] * (lengths + 4))

    forward.register_autograd(run_backward, setup_context)


_register_backward(DIFFERENTIAL, DIFFERENTIAL_BACKWARD, 0)
_register_backward(DIFFERENTIAL_VARLEN, DIFFERENTIAL_VARLEN_BACKWARD, 4)
