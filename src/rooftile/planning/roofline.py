"""The least time that a call needs on a machine, and what binds it (Williams et al. 2009)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rooftile.planning.hardware import Machine


@dataclass(frozen=True)
class Work:
    """flops: multiplications and additions; bytes: moved once each; exps: exponentials;
    int8_flops: those of `flops`' kind that are done on 8-bit integers, and so not in `flops`.
    """

    flops: float
    bytes: float
    exps: float = 0.0
    int8_flops: float = 0.0


@dataclass(frozen=True)
class Bound:
    """unit: "matrix", "exp" or "memory", the one that takes longest."""

    seconds: float
    unit: str


def linear_work(
    tokens: int,
    in_features: int,
    out_features: int,
    itemsize: int = 2,
    quantised_bytes: float | None = None,
) -> Work:
    """x [tokens, in] @ weight [out, in]^T, with x, weight and result read or written once.

    quantised_bytes: of a weight's number, scales included, where products are of 8-bit integers.
    """
    flops = 2.0 * tokens * in_features * out_features
    moved = float(itemsize * tokens * (in_features + out_features))
    weights = in_features * out_features
    if quantised_bytes is None:
        return Work(flops, moved + itemsize * weights)
    return Work(0.0, moved + quantised_bytes * weights, int8_flops=flops)


def attention_work(
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    *,
    num_q_heads: int,
    num_kv_heads: int,
    k_dim: int,
    v_dim: int,
    causal: bool = True,
    itemsize: int = 2,
) -> Work:
    """One attention call over a ragged batch; causal is bottom-right aligned."""
    pairs = sum(
        visible_pairs(q, kv) if causal else q * kv for q, kv in zip(q_lens, kv_lens, strict=True)
    )
    q_elements = sum(q_lens) * num_q_heads * (k_dim + v_dim)
    kv_elements = sum(kv_lens) * num_kv_heads * (k_dim + v_dim)
    return Work(
        flops=2.0 * pairs * num_q_heads * (k_dim + v_dim),
        bytes=float(itemsize * (q_elements + kv_elements)),
        exps=float(pairs * num_q_heads),
    )


def visible_pairs(q_len: int, kv_len: int) -> int:
    """Pairs (query, key) that a bottom-right aligned causal mask leaves."""
    rows = min(q_len, kv_len)  # queries before the first key see nothing
    return rows * kv_len - rows * (rows - 1) // 2


def least_time(work: Work, machine: Machine) -> Bound:
    """The units overlap perfectly, so the slowest one's time is the least."""
    times = {
        "matrix": work.flops / machine.matrix_flops + work.int8_flops / machine.int8_flops,
        "exp": work.exps / machine.exps,
        "memory": work.bytes / machine.bandwidth,
    }
    unit = max(times, key=lambda name: times[name])
    return Bound(times[unit], unit)
