"""Norms, rotation and append of a q, k, v product, one after the other."""

from __future__ import annotations

from torch import Tensor

from rooftile.kernels import Kernel, anything
from rooftile.kernels.reference.dual_chunk_rotary import dual_chunk_rotary
from rooftile.kernels.reference.norm import rms_norm
from rooftile.kernels.reference.paged import append_kv
from rooftile.kernels.reference.rope import rotary_embedding


def norm_rotate_append(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    weight_offset: float,
    positions: Tensor,
    cos_sin: Tensor | None,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    num_q_heads: int,
    num_kv_heads: int,
    chunk_size: int,  # 0: no chunks
    local_size: int,
    original_max_position: int,
    lengths: Tensor | None,
) -> Tensor:
    count = num_q_heads + 2 * num_kv_heads
    heads = qkv.unflatten(-1, (count, qkv.shape[1] // count))
    q, k, v = heads.split((num_q_heads, num_kv_heads, num_kv_heads), dim=1)
    if q_weight is not None:
        q, _ = rms_norm(q, q_weight, None, eps, weight_offset)
    if k_weight is not None:
        k, _ = rms_norm(k, k_weight, None, eps, weight_offset)
    if cos_sin is not None:
        key_positions = positions
        if chunk_size:
            key_positions = positions % (chunk_size - local_size)
            options = (False, chunk_size, local_size, original_max_position)
            q = dual_chunk_rotary(q, positions, lengths, cos_sin, *options)
        else:
            q = rotary_embedding(q, positions, cos_sin, False, False)
        k = rotary_embedding(k, key_positions, cos_sin, False, False)
    k, v = (x.reshape(len(x), k_pages.shape[1], k_pages.shape[3]) for x in (k, v))
    append_kv(k, v, k_pages, v_pages, slots, None, None, False, None, None)
    return q.clone() if cos_sin is None and q_weight is None else q


KERNELS = {"norm_rotate_append": Kernel(norm_rotate_append, anything, efficiency=0.1)}
