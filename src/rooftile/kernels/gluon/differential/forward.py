"""From the arguments of dense and ragged differential attention to a launch."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rooftile.kernels.gluon.attention.config import IN_TURN_Q_LEN, SECTION_BYTES, UNBOUNDED
from rooftile.kernels.gluon.attention.tile_list import NUM_FIELDS, list_tiles_kernel
from rooftile.kernels.gluon.counter import counter
from rooftile.kernels.gluon.differential.config import CONFIGS, ROWS, WIDEST_OF_TWO, config_of
from rooftile.kernels.gluon.differential.kernel import constants, differential_kernel
from rooftile.kernels.gluon.launch import Launch, multiprocessors
from rooftile.kernels.gluon.tile.rows import addressable, describe, describe_ragged

_LOG2_E = 1.4426950408889634
_MOST_KINDS = 1024
Outputs = tuple[Tensor, Tensor, Tensor]
_launches: dict[Any, Callable[..., Outputs]] = {}


def differential_attention(
    q1: Tensor,  # [batch, q_len, num_q_pairs, k_dim]
    k1: Tensor,  # [batch, kv_len, num_kv_pairs, k_dim]
    q2: Tensor,  # [batch, q_len, num_q_pairs, k_dim]
    k2: Tensor | None,  # [batch, kv_len, num_kv_pairs, k_dim]; None: k1
    v: Tensor,  # [batch, kv_len, num_kv_pairs, v_dim]
    lam: Tensor,  # [num_q_pairs] or [batch, q_len, num_q_pairs]
    left: int,
    right: int,
    scale: float,
) -> Outputs:  # [batch, q_len, num_q_pairs, v_dim], [batch, q_len, num_q_pairs] twice
    if q1[..., 0].numel() == 0 or k1.shape[1] == 0:
        return _nothing(q1, v)
    tensors, lam, scale = _prepared(q1, k1, q2, k2, v, lam, scale)
    shapes = tuple((x.shape, x.stride()) for x in (*tensors, lam))
    kind = (shapes, q1.dtype, q1.device, k2 is None, left, right, scale)
    run = _launches.get(kind) or _remember(
        kind, _dense(tensors, lam, k2 is None, left, right, scale)
    )
    return run(tensors, lam, None)


def differential_attention_varlen(
    q1: Tensor,  # [tokens_q, num_q_pairs, k_dim]
    k1: Tensor,  # [tokens_k, num_kv_pairs, k_dim]
    q2: Tensor,  # [tokens_q, num_q_pairs, k_dim]
    k2: Tensor | None,  # [tokens_k, num_kv_pairs, k_dim]; None: k1
    v: Tensor,  # [tokens_k, num_kv_pairs, v_dim]
    lam: Tensor,  # [num_q_pairs] or [tokens_q, num_q_pairs]
    cu_seqlens_q: Tensor,  # [batch + 1]
    cu_seqlens_k: Tensor,  # [batch + 1]
    max_q_len: int,
    max_kv_len: int,
    left: int,
    right: int,
    scale: float,
) -> Outputs:  # [tokens_q, num_q_pairs, v_dim], [tokens_q, num_q_pairs] twice
    batch = cu_seqlens_q.shape[0] - 1
    if q1[..., 0].numel() == 0 or k1.shape[0] == 0 or batch == 0:
        return _nothing(q1, v)
    tensors, lam, scale = _prepared(q1, k1, q2, k2, v, lam, scale)
    shapes = tuple((x.shape, x.stride()) for x in (*tensors, lam))
    kind = (shapes, q1.dtype, q1.device, k2 is None, left, right, scale, batch)
    run = _launches.get(kind) or _remember(
        kind, _ragged(tensors, lam, k2 is None, left, right, scale, batch)
    )
    return run(tensors, lam, (cu_seqlens_q.to(torch.int32), cu_seqlens_k.to(torch.int32)))


Tensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # q1, q2, k1, k2, v
Run = Callable[[Tensors, Tensor, tuple[Tensor, Tensor] | None], Outputs]


def _prepared(
    q1: Tensor, k1: Tensor, q2: Tensor, k2: Tensor | None, v: Tensor, lam: Tensor, scale: float
) -> tuple[Tensors, Tensor, float]:
    """Tensors that the copy engine can address, lam of every query in float32, a positive scale."""
    if scale <= 0:  # the row maximum is taken of raw scores
        sign = -1 if scale < 0 else 0
        q1, q2, scale = q1 * sign, q2 * sign, -scale or 1.0
    keys = addressable(k1)
    others = keys if k2 is None else addressable(k2)
    tensors = (addressable(q1), addressable(q2), keys, others, addressable(v))
    return tensors, lam.float().expand(q1.shape[:-1]), scale


def _remember(kind: Any, run: Run) -> Run:
    if len(_launches) >= _MOST_KINDS:
        _launches.clear()
    _launches[kind] = run
    return run


def _dense(
    tensors: Tensors, lam: Tensor, shared_keys: bool, left: int, right: int, scale: float
) -> Run:
    """Everything that does not depend on where tensors lie."""
    q1, q2, k1, k2, v = tensors
    batch, q_len, num_pairs, k_dim = q1.shape
    kv_len, num_kv_pairs, v_dim = v.shape[1:]
    config = config_of(k_dim, v_dim, shared_keys, q1.dtype == torch.float16)
    q_tiles = -(-q_len // ROWS)
    num_tiles = q_tiles * batch * num_pairs
    pairs_at_a_time = 1
    if right >= 0:
        section_bytes = next(size for longest, size in SECTION_BYTES if q_len <= longest)
        width = (1 if shared_keys else 2) * k_dim + v_dim
        pairs_at_a_time = max(section_bytes // (kv_len * width * v.element_size()), 1)
    group_size = num_pairs // num_kv_pairs
    section = min(pairs_at_a_time * group_size, batch * num_pairs)
    places = multiprocessors(q1.device)
    dynamic = (left >= 0 or right >= 0) and q_len > IN_TURN_Q_LEN and num_tiles > places
    out = q1.new_empty(batch, q_len, num_pairs, v_dim)
    launch = Launch(
        differential_kernel,
        min(num_tiles, places),
        q1.device,
        q1.dtype,
        (
            *(describe(x, ROWS, config.k_dim) for x in (q1, q2)),
            *(describe(x, config.block, config.k_dim) for x in (k1, k2)),
            describe(v, config.block, config.v_dim),
            describe(out, ROWS, config.v_dim),
            *(describe(x, ROWS, config.v_dim) for x in (k1, k2, v)),
        ),
        (
            *(num_tiles, num_pairs, group_size, q_len, kv_len, q_tiles, batch * num_pairs, section),
            *(min(left, UNBOUNDED), min(right, UNBOUNDED), *lam.stride(), scale * _LOG2_E),
        ),
        constants(config, False, dynamic, left >= 0, right >= 0, shared_keys),
    )

    def run(tensors: Tensors, lam: Tensor, lengths: object) -> Outputs:
        out, lse1, lse2 = _outputs(tensors)
        drawn = counter(lam.device) if dynamic else lse1
        launch((*tensors, out, *tensors[2:]), (lse1, lse2, lam, drawn))
        return out, lse1, lse2

    return run


def _ragged(
    tensors: Tensors, lam: Tensor, shared_keys: bool, left: int, right: int, scale: float,
    batch: int,
) -> Run:  # fmt: skip
    q1, q2, k1, k2, v = tensors
    tokens, num_pairs, k_dim = q1.shape
    num_kv_pairs, v_dim = v.shape[1:]
    config, device = config_of(k_dim, v_dim, shared_keys, q1.dtype == torch.float16), q1.device
    # Every sequence, and the padding after the last, ends in at most one tile that is not full.
    capacity = tokens // ROWS + min(batch + 1, tokens)
    list_tiles = Launch(
        *(list_tiles_kernel, batch + 1, device, torch.int32, (), (batch, tokens)),
        (("tile_rows", ROWS),),
    )
    launch = Launch(
        differential_kernel,
        min(capacity * num_pairs, multiprocessors(device)),
        device,
        q1.dtype,
        (
            *(describe_ragged(x, ROWS, config.k_dim) for x in (q1, q2)),
            *(describe_ragged(x, config.block, config.k_dim) for x in (k1, k2)),
            describe_ragged(v, config.block, config.v_dim),
            describe_ragged(q1.new_empty(tokens, num_pairs, v_dim), ROWS, config.v_dim),
            *(describe_ragged(x, ROWS, config.v_dim) for x in (k1, k2, v)),
        ),
        (
            *(0, num_pairs, num_pairs // num_kv_pairs, 0, 0, 0, 0, 0),
            *(min(left, UNBOUNDED), min(right, UNBOUNDED), 0, *lam.stride(), scale * _LOG2_E),
        ),
        constants(config, True, True, left >= 0, right >= 0, shared_keys),
    )

    def run(tensors: Tensors, lam: Tensor, lengths: tuple[Tensor, Tensor] | None) -> Outputs:
        assert lengths is not None
        out, lse1, lse2 = _outputs(tensors)
        entries = lam.new_empty(1 + capacity, NUM_FIELDS, dtype=torch.int32)
        list_tiles((), (entries, *lengths))
        launch((*tensors, out, *tensors[2:]), (lse1, lse2, lam, entries))
        return out, lse1, lse2

    return run


def _outputs(tensors: Tensors) -> Outputs:
    q, v = tensors[0], tensors[4]
    lse1, lse2 = (q.new_empty(q.shape[:-1], dtype=torch.float32) for _ in range(2))
    return q.new_empty(*q.shape[:-1], v.shape[-1]), lse1, lse2


def _nothing(q: Tensor, v: Tensor) -> Outputs:
    lse1, lse2 = (q.new_full(q.shape[:-1], -torch.inf, dtype=torch.float32) for _ in range(2))
    return q.new_zeros(*q.shape[:-1], v.shape[-1]), lse1, lse2


def supports(call: Any) -> str | None:
    if call.device != "cuda":
        return f"it needs an NVIDIA GPU of compute capability 9.0, not a {call.device}"
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        return f"it is for compute capability 9.0, this GPU has {capability[0]}.{capability[1]}"
    if call.dtype not in (torch.bfloat16, torch.float16):
        return f"it takes bfloat16 and float16, not {call.dtype}"
    widest = CONFIGS[-1].k_dim if call.shared_keys else WIDEST_OF_TWO
    for name, dim, most in (
        ("k_dim", call.k_dim, widest),
        ("v_dim", call.v_dim, CONFIGS[-1].v_dim),
    ):
        if dim % 8 or dim > most:
            return f"{name} is {dim}; it takes multiples of 8 up to {most}"
    return None
