"""Scaled dot-product attention over dense and ragged batches (Vaswani et al. 2017, eq. 1).

Keys are visible to queries as if the last query stood at the last key (bottom-right alignment).
Sinks are those of Xiao et al. 2023 in the learned form of gpt-oss: one more logit per query head.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rooftile.kernels.modifiers import Modifier
from rooftile.ops.attention_alibi import ATTENTION_ALIBI, ATTENTION_VARLEN_ALIBI, run_alibi
from rooftile.ops.attention_call import AttentionCall as AttentionCall  # others know it from here
from rooftile.ops.attention_call import attention_call, fake_attention
from rooftile.ops.attention_check import (
    Window,
    check_alibi,
    check_cu_seqlens,
    check_options,
    check_qkv,
)
from rooftile.ops.attention_mods import ATTENTION_MODS, ATTENTION_VARLEN_MODS, run_modified
from rooftile.ops.check import require
from rooftile.ops.eager import CheckedCalls, undispatched
from rooftile.ops.modifiers import check_modifiers
from rooftile.ops.operator import Operator, contents_checked

_CHECKED = CheckedCalls()
_CHECKED_VARLEN = CheckedCalls()


def attention(
    q: Tensor,  # [batch, q_len, num_q_heads, k_dim]
    k: Tensor,  # [batch, kv_len, num_kv_heads, k_dim]
    v: Tensor,  # [batch, kv_len, num_kv_heads, v_dim]
    *,
    causal: bool = False,
    window: Window | None = None,
    softcap: float = 0.0,
    sink: Tensor | None = None,  # [num_q_heads]
    alibi_slopes: Tensor | None = None,  # [num_q_heads]
    softmax_scale: float | None = None,
    score_mod: Modifier | None = None,
    mask_mod: Modifier | None = None,
    return_lse: bool = False,
    kernel: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of every query head over its group's keys and values.

    Query i stands at position p = i + kv_len - q_len and sees key j iff p - left <= j <= p + right,
    with `window` = (left, right) and None for an unbounded side; `causal` sets right to 0.
    Scores are q . k * softmax_scale (default 1 / sqrt(k_dim)), then softcap * tanh(score / softcap)
    if softcap > 0. `sink` (float32) adds one logit per query head to the denominator and to lse.
    A query that sees nothing gives 0, and lse -inf (or the sink). Differentiable in q, k, v and
    sink, through lse too. Float64 inputs are computed in float64, others accumulate in float32.

    `alibi_slopes` lower scores, after the soft cap, by slope * |p - j| (Press et al. 2022); gradients
    with them, theirs too, come from the torch reference.

    `score_mod` and `mask_mod`, made by the functions of these names, change scores after the soft
    cap and visibility before the softmax. Gradients with them come from the torch reference.

    Args:
        q: [batch, q_len, num_q_heads, k_dim]
        k: [batch, kv_len, num_kv_heads, k_dim]
        v: [batch, kv_len, num_kv_heads, v_dim]
        sink: [num_q_heads]
        alibi_slopes: [num_q_heads]

    Returns:
        out [batch, q_len, num_q_heads, v_dim] in q's dtype; with `return_lse` also lse
        [batch, q_len, num_q_heads], natural logarithm, float32 (float64 for float64 inputs).

    Raises:
        ValueError: shapes, dtypes, devices or options that do not fit together.
        NotImplementedError: an explicitly chosen kernel that cannot run the call.
    """
    kind = None
    plain = score_mod is None and mask_mod is None and alibi_slopes is None
    if plain and undispatched(q, k, v) and (sink is None or undispatched(sink)):
        kind = (
            *(q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride()),
            *(q.dtype, k.dtype, v.dtype, q.device, k.device, v.device),
            *(causal, window, softcap, softmax_scale, kernel, return_lse),
            None if sink is None else (sink.shape, sink.stride(), sink.dtype, sink.device),
        )
        run = _CHECKED.get(kind)
        if run is not None:
            out, lse = run(q, k, v, sink)
            return (out, lse) if return_lse else out
    check_qkv("attention", q, k, v, "[batch, length, heads, dim]", 4)
    require(
        q.shape[0] == k.shape[0],
        lambda: (
            f"attention: q has batch {q.shape[0]} but k has batch {k.shape[0]}; they must be equal"
        ),
    )
    left, right, scale = check_options("attention", q, causal, window, softcap, sink, softmax_scale)
    if alibi_slopes is not None:
        check_alibi("attention", q, alibi_slopes, score_mod, mask_mod)
        rest = (left, right, softcap, scale)
        out, lse = run_alibi(ATTENTION_ALIBI, (q, k, v), sink, alibi_slopes, rest, kernel)
    elif score_mod is not None or mask_mod is not None:
        check_modifiers("attention", q, score_mod, mask_mod)
        options = (sink, left, right, softcap, scale)
        out, lse = run_modified(ATTENTION_MODS, (q, k, v), options, score_mod, mask_mod, kernel)
    else:
        out, lse = ATTENTION.handle(q, k, v, sink, left, right, softcap, scale, kernel)
        if kind is not None:
            rest = (left, right, softcap, scale)
            run = ATTENTION.bind((q, k, v, sink), rest, kernel, results=1 + bool(return_lse))
            _CHECKED.add(kind, run)
    return (out, lse) if return_lse else out


def attention_varlen(
    q: Tensor,  # [tokens_q, num_q_heads, k_dim]
    k: Tensor,  # [tokens_k, num_kv_heads, k_dim]
    v: Tensor,  # [tokens_k, num_kv_heads, v_dim]
    cu_seqlens_q: Tensor,  # [batch + 1] int32 or int64
    cu_seqlens_k: Tensor,  # [batch + 1] int32 or int64
    *,
    max_q_len: int | None = None,
    max_kv_len: int | None = None,
    causal: bool = False,
    window: Window | None = None,
    softcap: float = 0.0,
    sink: Tensor | None = None,  # [num_q_heads]
    alibi_slopes: Tensor | None = None,  # [num_q_heads]
    softmax_scale: float | None = None,
    score_mod: Modifier | None = None,
    mask_mod: Modifier | None = None,
    return_lse: bool = False,
    kernel: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention` over sequences of different lengths, laid end to end.

    Sequence i has queries cu_seqlens_q[i] to cu_seqlens_q[i + 1] and the keys likewise; both
    begin with 0 and never decrease. `max_q_len` and `max_kv_len` are upper bounds of the lengths,
    known on the host (default: all tokens). Tokens after the last sequence are padding: they are
    not read, and their output is 0 with lse -inf.

    Args:
        q: [tokens_q, num_q_heads, k_dim]
        k: [tokens_k, num_kv_heads, k_dim]
        v: [tokens_k, num_kv_heads, v_dim]
        cu_seqlens_q: [batch + 1] int32 or int64
        cu_seqlens_k: [batch + 1] int32 or int64
        sink: [num_q_heads]
        alibi_slopes: [num_q_heads]

    Returns:
        out [tokens_q, num_q_heads, v_dim]; with `return_lse` also lse [tokens_q, num_q_heads].

    Raises:
        ValueError: as `attention`; and, where the contents are checked (on a CPU, or with
            ROOFTILE_CHECK=1), lengths that decrease, exceed the tokens or exceed the maxima.
    """
    name = "attention_varlen"
    kind = None
    plain = score_mod is None and mask_mod is None and alibi_slopes is None
    given: tuple[Tensor, ...] = (q, k, v, cu_seqlens_q, cu_seqlens_k)
    if sink is not None:
        given = (*given, sink)
    if plain and undispatched(*given) and not contents_checked(cu_seqlens_q):
        kind = (
            *(q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride()),
            *(q.dtype, k.dtype, v.dtype, q.device, k.device, v.device),
            *(causal, window, softcap, softmax_scale, kernel, return_lse, max_q_len, max_kv_len),
            *(cu_seqlens_q.shape, cu_seqlens_q.stride(), cu_seqlens_q.dtype, cu_seqlens_q.device),
            *(cu_seqlens_k.shape, cu_seqlens_k.stride(), cu_seqlens_k.dtype, cu_seqlens_k.device),
            None if sink is None else (sink.shape, sink.stride(), sink.dtype, sink.device),
        )
        run = _CHECKED_VARLEN.get(kind)
        if run is not None:
            out, lse = run(q, k, v, cu_seqlens_q, cu_seqlens_k, sink)
            return (out, lse) if return_lse else out
    check_qkv(name, q, k, v, "[tokens, heads, dim]", 3)
    left, right, scale = check_options(name, q, causal, window, softcap, sink, softmax_scale)
    max_q_len = q.shape[0] if max_q_len is None else max_q_len
    max_kv_len = k.shape[0] if max_kv_len is None else max_kv_len
    check_cu_seqlens(name, "cu_seqlens_q", cu_seqlens_q, "q", q, max_q_len, "max_q_len")
    check_cu_seqlens(name, "cu_seqlens_k", cu_seqlens_k, "k", k, max_kv_len, "max_kv_len")
    require(
        cu_seqlens_q.shape == cu_seqlens_k.shape,
        lambda: (
            f"{name}: cu_seqlens_q has {cu_seqlens_q.shape[0]} entries but cu_seqlens_k has "
            f"{cu_seqlens_k.shape[0]}; both need batch + 1"
        ),
    )
    tensors = (q, k, v, cu_seqlens_q, cu_seqlens_k, max_q_len, max_kv_len)
    options = (sink, left, right, softcap, scale)
    if alibi_slopes is not None:
        check_alibi(name, q, alibi_slopes, score_mod, mask_mod)
        operator = ATTENTION_VARLEN_ALIBI
        out, lse = run_alibi(operator, tensors, sink, alibi_slopes, options[1:], kernel)
    elif score_mod is not None or mask_mod is not None:
        check_modifiers(name, q, score_mod, mask_mod)
        operator = ATTENTION_VARLEN_MODS
        out, lse = run_modified(operator, tensors, options, score_mod, mask_mod, kernel)
    else:
        out, lse = ATTENTION_VARLEN.handle(*tensors, *options, kernel)
        if kind is not None:
            rest = (max_q_len, max_kv_len, left, right, softcap, scale)
            run = ATTENTION_VARLEN.bind(
                (*tensors[:5], sink), rest, kernel, _join_ragged, 1 + bool(return_lse)
            )
            _CHECKED_VARLEN.add(kind, run)
    return (out, lse) if return_lse else out


def _join_ragged(tensors: tuple[Any, ...], rest: tuple[Any, ...]) -> tuple[Any, ...]:
    """The private arguments in order: the longest lengths stand before the sink."""
    return (*tensors[:5], *rest[:2], tensors[5], *rest[2:])


def _fake_backward(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, lse: Tensor
) -> tuple[Tensor, ...]:
    grad_sink = lse.new_empty(0) if sink is None else sink.new_empty(sink.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), grad_sink


_OPTIONS = "int left, int right, float softcap, float scale"
_SAVED = "Tensor out, Tensor lse, Tensor grad_out, Tensor grad_lse"
_RAGGED = (
    "Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k,"
    " SymInt max_q_len, SymInt max_kv_len, Tensor? sink"
)

ATTENTION = Operator(
    "attention",
    f"(Tensor q, Tensor k, Tensor v, Tensor? sink, {_OPTIONS}) -> (Tensor, Tensor)",
    module="attention",
    families=("gluon", "triton", "torch", "reference"),
    call=lambda q, k, v, sink, left, right, softcap, scale: attention_call(
        q, k, v, sink, left, right, softcap
    ),
    fake=lambda q, k, v, *_: fake_attention(q, v),
)

ATTENTION_BACKWARD = Operator(
    "attention_backward",
    f"(Tensor q, Tensor k, Tensor v, Tensor? sink, {_SAVED}, {_OPTIONS})"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    module="attention",
    families=("reference",),
    call=lambda q, k, v, sink, out, lse, grad_out, grad_lse, left, right, softcap, scale: (
        attention_call(q, k, v, sink, left, right, softcap)
    ),
    fake=lambda q, k, v, sink, out, lse, *_: _fake_backward(q, k, v, sink, lse),
).record_kernels()

ATTENTION_VARLEN = Operator(
    "attention_varlen",
    f"({_RAGGED}, {_OPTIONS}) -> (Tensor, Tensor)",
    module="attention",
    families=("gluon", "triton", "torch", "reference"),
    call=lambda q, k, v, cu_q, cu_k, max_q, max_kv, sink, left, right, softcap, scale: (
        attention_call(q, k, v, sink, left, right, softcap)
    ),
    fake=lambda q, k, v, *_: fake_attention(q, v),
)

ATTENTION_VARLEN_BACKWARD = Operator(
    "attention_varlen_backward",
    f"({_RAGGED}, {_SAVED}, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)",
    module="attention",
    families=("reference",),
    call=lambda q, k, v, cu_q, cu_k, max_q, max_kv, sink, *rest: attention_call(
        q, k, v, sink, *rest[4:7]
    ),
    fake=lambda q, k, v, cu_q, cu_k, max_q, max_kv, sink, out, lse, *_: _fake_backward(
        q, k, v, sink, lse
    ),
).record_kernels()


def _register_backward(forward: Operator, backward: Operator) -> None:
    """Both take (tensors, lengths, sink, options); the backward takes the saved ones before options."""
    options = 4

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *arguments, _ = inputs
        ctx.options = arguments[-options:]
        *given, sink = arguments[:-options]
        ctx.lengths = [x for x in given if not isinstance(x, Tensor)]
        ctx.save_for_backward(*(x for x in given if isinstance(x, Tensor)), sink, *output)

    def run_backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Any, ...]:
        *tensors, sink, out, lse = ctx.saved_tensors
        grad_q, grad_k, grad_v, grad_sink = backward.handle(
            *(*tensors, *ctx.lengths, sink, out, lse, grad_out, grad_lse), *ctx.options, "auto"
        )
        return (
            *(grad_q, grad_k, grad_v),
            *[None] * (len(tensors) - 3 + len(ctx.lengths)),
            None if sink is None else grad_sink,
            *[None] * (options + 1),
        )

    forward.register_autograd(run_backward, setup_context)


_register_backward(ATTENTION, ATTENTION_BACKWARD)
_register_backward(ATTENTION_VARLEN, ATTENTION_VARLEN_BACKWARD)
