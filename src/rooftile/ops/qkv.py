"""What lies between the q, k, v product and attention, in one operator: norms, rotation, append."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rooftile.ops.operator import Operator


@dataclass(frozen=True)
class QkvCall:
    """The static properties that choose a kernel."""

    device: str
    dtype: torch.dtype
    head_dim: int
    rotary_dim: int  # 0: no rotation
    has_norm: bool
    chunked: bool = False


def head_dim_of(qkv: Tensor, num_q_heads: int, num_kv_heads: int) -> int:
    return qkv.shape[1] // (num_q_heads + 2 * num_kv_heads)


# qkv [tokens, (num_q_heads + 2 * num_kv_heads) * head_dim]: all q heads, then k's, then v's. Each head
# of q and k is normalised (`rms_norm` with q_weight or k_weight [head_dim], where given) and turned by
# its position (`rotary_embedding`, pairs i and i + rotary_dim / 2); k and v go into their slots
# (`append_kv`), as many heads side by side in a slot as its width holds. Returns q
# [tokens, num_q_heads, head_dim]. With chunk_size > 0 q is what `dual_chunk_rotary` makes of it,
# [3, tokens, num_q_heads, head_dim], and keys are turned by their positions in their chunks. Equal to
# these operators in turn: what each of them would return is rounded to the dtype before the next.
NORM_ROTATE_APPEND = Operator(
    "norm_rotate_append",
    "(Tensor qkv, Tensor? q_weight, Tensor? k_weight, float eps, float weight_offset,"
    " Tensor positions, Tensor? cos_sin, Tensor(a!) k_pages, Tensor(b!) v_pages, Tensor slots,"
    " int num_q_heads, int num_kv_heads, int chunk_size, int local_size, int original_max_position,"
    " Tensor? lengths) -> Tensor",
    module="qkv",
    families=("triton", "reference"),
    call=lambda qkv, q_weight, k_weight, eps, offset, positions, cos_sin, k_pages, *rest: QkvCall(
        qkv.device.type,
        qkv.dtype,
        head_dim_of(qkv, *rest[2:4]),
        0 if cos_sin is None else 2 * cos_sin.shape[2],
        q_weight is not None,
        rest[4] > 0,
    ),
    fake=lambda qkv, q_weight, k_weight, eps, offset, positions, cos_sin, k_pages, *rest: (
        qkv.new_empty(
            *((3,) if rest[4] else ()), qkv.shape[0], rest[2], head_dim_of(qkv, *rest[2:4])
        )
    ),
)
