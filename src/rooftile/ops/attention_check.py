"""Checks shared by the attention operators: queries, keys and values, options, cumulative lengths."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor

from rooftile.kernels.modifiers import Modifier
from rooftile.ops.check import (
    FLOAT32_MAX,
    check_device,
    check_flags,
    check_float,
    check_integers,
    check_same,
    check_shape,
    check_tensors,
    check_whole,
    is_finite,
    require,
)
from rooftile.ops.operator import contents_checked

Window = tuple[int | None, int | None]
UNREACHABLE = 2**31 - 1  # a window side that no sequence is as long as
LEAST_SOFTCAP = 1e-37  # whose inverse is a float32 too


def check_qkv(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: str,
    dims: int,
    q_name: str = "q",
    k_name: str = "k",
) -> None:
    given = {q_name: q, k_name: k, "v": v}
    check_tensors(name, **given)
    for tensor_name, tensor in given.items():
        if tensor.dim() != dims:
            raise ValueError(
                f"{name}: {tensor_name} has shape {list(tensor.shape)}; expected {layout}"
            )
    check_float(name, **{q_name: q})
    check_same(name, **given)
    require(
        q.shape[-1] == k.shape[-1] and q.shape[-1] > 0,
        lambda: (
            f"{name}: {q_name} has dim {q.shape[-1]} and {k_name} has dim {k.shape[-1]}; "
            f"they must be equal and positive"
        ),
    )
    require(
        k.shape[:-1] == v.shape[:-1] and v.shape[-1] > 0,
        lambda: (
            f"{name}: {k_name} has shape {list(k.shape)} and v has shape {list(v.shape)}; "
            f"all but the last dimension must be equal, and that one positive"
        ),
    )
    check_heads(name, q.shape[-2], k.shape[-2])


def check_heads(name: str, num_q_heads: int, num_kv_heads: int) -> None:
    require(
        num_kv_heads > 0 and num_q_heads > 0 and num_q_heads % num_kv_heads == 0,
        lambda: (
            f"{name}: {num_q_heads} query heads do not divide into groups over {num_kv_heads} "
            f"key-value heads; num_q_heads must be a positive multiple of num_kv_heads "
            f"(heads are the last dimension but one)"
        ),
    )


def check_options(
    name: str,
    q: Tensor,  # [..., num_q_heads, k_dim]
    causal: bool,
    window: Window | None,
    softcap: float,
    sink: Tensor | None,
    softmax_scale: float | None,
) -> tuple[int, int, float]:
    """The checked options as private operators take them: left, right (-1: unbounded), scale."""
    require(
        window is None or (isinstance(window, tuple | list) and len(window) == 2),
        lambda: f"{name}: window is {window}; expected (left, right), None for an unbounded side",
    )
    sides = (None, None) if window is None else window
    require(
        all(side is None or (isinstance(side, int) and side >= 0) for side in sides),
        lambda: f"{name}: window is {window}; each side must be an int >= 0, or None for unbounded",
    )
    check_flags(name, causal=causal)
    left, right = (-1 if side is None or side >= UNREACHABLE else side for side in sides)
    require(
        is_finite(softcap) and (softcap == 0 or softcap >= LEAST_SOFTCAP),
        lambda: (
            f"{name}: softcap is {softcap!r:.80}; it must be 0, which turns it off, or a number from "
            f"{LEAST_SOFTCAP} to {FLOAT32_MAX}"
        ),
    )
    if softmax_scale is None:
        scale = q.shape[-1] ** -0.5
    else:
        scale = softmax_scale
        require(
            is_finite(scale),
            lambda: (
                f"{name}: softmax_scale is {scale!r:.80}; it must be a finite number, at most "
                f"{FLOAT32_MAX} on either side"
            ),
        )
    if sink is not None:
        check_float(name, sink=sink)
        check_shape(name, "sink", sink, (q.shape[-2],), "[num_q_heads]")
        check_device(name, q=q, sink=sink)
    return left, 0 if causal else right, scale


def check_alibi(
    name: str,
    q: Tensor,  # [..., num_q_heads, k_dim]
    slopes: Tensor,
    score_mod: Modifier | None,
    mask_mod: Modifier | None,
) -> None:
    check_float(name, alibi_slopes=slopes)
    check_shape(name, "alibi_slopes", slopes, (q.shape[-2],), "[num_q_heads]")
    check_device(name, q=q, alibi_slopes=slopes)
    require(
        score_mod is None and mask_mod is None,
        lambda: (
            f"{name}: alibi_slopes is given with score_mod or mask_mod; make the bias a part of "
            f"score_mod"
        ),
    )


def check_cu_seqlens(
    name: str,
    cu_name: str,
    cu_seqlens: Tensor,
    of_name: str,
    of: Tensor,  # [tokens, ...]
    longest: int,
    longest_name: str,
) -> None:
    check_integers(name, cu_name, cu_seqlens, of, of_name)
    require(
        cu_seqlens.dim() == 1 and cu_seqlens.shape[0] > 0,
        lambda: f"{name}: {cu_name} has shape {list(cu_seqlens.shape)}; expected [batch + 1]",
    )
    check_whole(name, 0, **{longest_name: longest})
    if not contents_checked(cu_seqlens):
        return
    ends = cu_seqlens.tolist()
    lengths = [end - start for start, end in pairwise(ends)]
    require(ends[0] == 0, lambda: f"{name}: {cu_name} begins with {ends[0]}; it must begin with 0")
    require(
        min(lengths, default=0) >= 0,
        lambda: (
            f"{name}: {cu_name} decreases to {min(lengths, default=0)} relative to its predecessor; "
            f"give cumulative lengths, which never decrease"
        ),
    )
    require(
        ends[-1] <= of.shape[0],
        lambda: f"{name}: {cu_name} ends with {ends[-1]} but {of_name} has {of.shape[0]} tokens",
    )
    require(
        max(lengths, default=0) <= longest,
        lambda: (
            f"{name}: {cu_name} has a sequence of {max(lengths, default=0)} tokens but {longest_name} "
            f"is {longest}; give an upper bound"
        ),
    )
