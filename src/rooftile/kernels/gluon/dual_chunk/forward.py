"""From the arguments of dense dual chunk attention to a launch."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rooftile.kernels.gluon.attention import supports as plain_supports
from rooftile.kernels.gluon.attention.config import (
    ANCHORED,
    ANCHORED_Q_LEN,
    CONFIGS,
    IN_TURN_Q_LEN,
    SECTION_BYTES,
    Config,
)
from rooftile.kernels.gluon.counter import counter
from rooftile.kernels.gluon.dual_chunk.kernel import constants, dual_chunk_kernel
from rooftile.kernels.gluon.launch import Launch, multiprocessors
from rooftile.kernels.gluon.tile.rows import addressable, describe_ragged

_LOG2_E = 1.4426950408889634
_MOST_KINDS = 1024
Result = tuple[Tensor, Tensor]
_launches: dict[Any, Callable[..., Result]] = {}


def dual_chunk_attention(
    q_intra: Tensor,  # [batch, q_len, num_q_heads, k_dim]
    q_succ: Tensor,  # [batch, q_len, num_q_heads, k_dim]
    q_inter: Tensor,  # [batch, q_len, num_q_heads, k_dim]
    k: Tensor,  # [batch, kv_len, num_kv_heads, k_dim]
    v: Tensor,  # [batch, kv_len, num_kv_heads, v_dim]
    chunk_len: int,  # whole blocks of keys
    softcap: float,
    scale: float,
) -> Result:  # [batch, q_len, num_q_heads, v_dim], [batch, q_len, num_q_heads]
    lengths = (q_intra.shape[1], k.shape[1])
    if q_intra[..., 0].numel() == 0 or lengths[1] == 0:
        out = q_intra.new_zeros(*q_intra.shape[:-1], v.shape[-1])
        return out, q_intra.new_full(q_intra.shape[:-1], -torch.inf, dtype=torch.float32)
    queries: tuple[Tensor, ...] = (q_intra, q_succ, q_inter)
    if scale <= 0:  # the row maximum is taken of raw scores
        sign = -1 if scale < 0 else 0
        queries, scale = tuple(q * sign for q in queries), -scale or 1.0
    tensors = tuple(addressable(x.flatten(0, 1)) for x in (*queries, k, v))
    options = (*lengths, chunk_len, softcap, scale)
    kind = (tuple((x.shape, x.stride()) for x in tensors), k.dtype, k.device, options)
    run = _launches.get(kind)
    if run is None:
        if len(_launches) >= _MOST_KINDS:
            _launches.clear()
        run = _launches[kind] = _kind_of_call(tensors, *options)
    out, lse = run(tensors)
    return out.unflatten(0, q_intra.shape[:2]), lse.unflatten(0, q_intra.shape[:2])


def _kind_of_call(
    tensors: tuple[Tensor, ...],  # three queries, k, v: [batch * length, heads, dim]
    q_len: int,
    kv_len: int,
    chunk_len: int,
    softcap: float,
    scale: float,
) -> Callable[[tuple[Tensor, ...]], Result]:
    """Everything that does not depend on where tensors lie."""
    *queries, k, v = tensors
    q = queries[0]
    rows, num_heads, k_dim = q.shape
    batch, num_kv_heads, v_dim = rows // q_len, k.shape[1], v.shape[2]
    config = config_of(k_dim, v_dim)
    # float16 ends at 2^16, too soon for weights under an anchored maximum.
    if config.dim in ANCHORED and q_len >= ANCHORED_Q_LEN and q.dtype != torch.float16:
        config = ANCHORED[config.dim]
    tile_rows = config.tile_rows
    offset = kv_len - q_len
    # Queries of the first query's chunk, and those before the first key.
    first_rows = min((max(offset, 0) // chunk_len + 1) * chunk_len - offset, q_len)
    first_tiles, chunk_tiles = -(-first_rows // tile_rows), -(-chunk_len // tile_rows)
    whole, rest = divmod(q_len - first_rows, chunk_len)
    q_tiles = first_tiles + whole * chunk_tiles + -(-rest // tile_rows)
    num_tiles = q_tiles * batch * num_heads
    section_bytes = next(size for longest, size in SECTION_BYTES if q_len <= longest)
    heads_at_a_time = max(section_bytes // (kv_len * (k_dim + v_dim) * k.element_size()), 1)
    group_size = num_heads // num_kv_heads
    section = min(heads_at_a_time * group_size, batch * num_heads)
    places = multiprocessors(q.device)
    dynamic = q_len > IN_TURN_Q_LEN and num_tiles > places
    launch = Launch(
        dual_chunk_kernel,
        min(num_tiles, places),
        q.device,
        q.dtype,
        (
            *(describe_ragged(x, 64, config.dim) for x in queries),
            describe_ragged(k, config.block, config.dim),
            describe_ragged(v, config.block, config.dim),
            describe_ragged(q.new_empty(rows, num_heads, v_dim), 64, config.dim),
            *(describe_ragged(x, 64, config.dim) for x in (k, v)),
        ),
        (
            *(num_tiles, num_heads, group_size, q_len, kv_len, q_tiles, batch * num_heads, section),
            *(0, 0, chunk_len // config.block, first_rows, first_tiles, chunk_tiles),
            # With a cap, what goes into tanh, and the log2 units that come out.
            scale / softcap if softcap else scale * _LOG2_E,
            softcap * _LOG2_E,
        ),
        constants(config, dynamic, softcap != 0),
    )

    def run(tensors: tuple[Tensor, ...]) -> Result:
        q = tensors[0]
        out = q.new_empty(rows, num_heads, v_dim)
        lse = q.new_empty(rows, num_heads, dtype=torch.float32)
        launch((*tensors, out, *tensors[3:]), (lse, counter(q.device) if dynamic else lse))
        return out, lse

    return run


def config_of(k_dim: int, v_dim: int) -> Config:
    return CONFIGS[next(dim for dim in CONFIGS if dim >= max(k_dim, v_dim))]


def supports(call: Any) -> str | None:
    reason = plain_supports(call)
    if reason is not None:
        return reason
    block = config_of(call.k_dim, call.v_dim).block
    if call.chunk_len % block:
        return f"chunks of {call.chunk_len} tokens are no whole blocks of {block} keys"
    return None
