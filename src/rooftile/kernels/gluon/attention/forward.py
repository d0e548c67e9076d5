"""From an operator's arguments to a launch.

What shapes, strides and options decide (descriptors, the order of tiles, the grid) is worked out
once for each kind of call; a call of a known kind only allocates and launches.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rooftile.kernels.gluon.attention.config import (
    AGAIN_ROWS,
    CONFIGS,
    IN_TURN_Q_LEN,
    MOST_TILES_SORTED,
    UNBOUNDED,
    Config,
    box_columns,
    config_of,
    heads_at_a_time,
    short_of,
    typical_length,
)
from rooftile.kernels.gluon.attention.cut import cut_of
from rooftile.kernels.gluon.attention.kernel import attention_kernel, constants
from rooftile.kernels.gluon.attention.mods import NO_MODS, Mods
from rooftile.kernels.gluon.attention.short.forward import bind_short
from rooftile.kernels.gluon.attention.tile_list import NUM_FIELDS, list_tiles_kernel
from rooftile.kernels.gluon.counter import address_of_counter, counter, counters
from rooftile.kernels.gluon.launch import Box, Launch, multiprocessors
from rooftile.kernels.gluon.tile.rows import (
    addressable,
    describe,
    describe_ragged,
    is_addressable,
)
from rooftile.kernels.offline import building

_LOG2_E = 1.4426950408889634
_MOST_KINDS = 1024
Result = tuple[Tensor, Any]  # the output, and the lse or None where nobody reads it
_dense: dict[Any, Callable[..., Result]] = {}
_ragged: dict[Any, Callable[..., Result]] = {}


def attention(
    q: Tensor,  # [batch, q_len, num_q_heads, k_dim]
    k: Tensor,  # [batch, kv_len, num_kv_heads, k_dim]
    v: Tensor,  # [batch, kv_len, num_kv_heads, v_dim]
    sink: Tensor | None,  # [num_q_heads]
    left: int,
    right: int,
    softcap: float,
    scale: float,
    config: Config | None = None,
    slopes: Tensor | None = None,  # [num_q_heads] float32, of ALiBi
    mods: Mods = NO_MODS,
) -> Result:  # [batch, q_len, num_q_heads, v_dim], [batch, q_len, num_q_heads]
    options = (left, right, softcap, scale, config)
    kind = (
        *(
            q.shape,
            q.stride(),
            k.shape,
            k.stride(),
            v.shape,
            v.stride(),
            q.dtype,
            q.device,
        ),
        *(sink is None, slopes is None, options, mods.functions),
    )
    run = _dense.get(kind)
    if run is None:
        if len(_dense) >= _MOST_KINDS:
            _dense.clear()
        run = _dense[kind] = bind_attention(q, k, v, sink, *options, slopes, mods)
    return run(q, k, v, sink, slopes, mods)


def attention_varlen(
    q: Tensor,  # [tokens_q, num_q_heads, k_dim]
    k: Tensor,  # [tokens_k, num_kv_heads, k_dim]
    v: Tensor,  # [tokens_k, num_kv_heads, v_dim]
    cu_seqlens_q: Tensor,  # [batch + 1]
    cu_seqlens_k: Tensor,  # [batch + 1]
    max_q_len: int,
    max_kv_len: int,
    sink: Tensor | None,  # [num_q_heads]
    left: int,
    right: int,
    softcap: float,
    scale: float,
    config: Config | None = None,
    slopes: Tensor | None = None,  # [num_q_heads] float32, of ALiBi
    mods: Mods = NO_MODS,
) -> Result:  # [tokens_q, num_q_heads, v_dim], [tokens_q, num_q_heads]
    options = (left, right, softcap, scale, config)
    kind = (
        *(
            q.shape,
            q.stride(),
            k.shape,
            k.stride(),
            v.shape,
            v.stride(),
            q.dtype,
            q.device,
        ),
        *(
            cu_seqlens_q.shape,
            cu_seqlens_q.dtype,
            cu_seqlens_k.dtype,
            cu_seqlens_q.stride(),
            cu_seqlens_k.stride(),
            max_q_len,
            max_kv_len,
            sink is None,
            slopes is None,
            options,
            mods.functions,
        ),
    )
    run = _ragged.get(kind)
    if run is None:
        if len(_ragged) >= _MOST_KINDS:
            _ragged.clear()
        run = _ragged[kind] = bind_attention_varlen(
            *(q, k, v, cu_seqlens_q, cu_seqlens_k, max_q_len, max_kv_len, sink),
            *options,
            slopes,
            mods,
        )
    return run(q, k, v, cu_seqlens_q, cu_seqlens_k, sink, slopes, mods)


def bind_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    left: int,
    right: int,
    softcap: float,
    scale: float,
    config: Config | None = None,
    slopes: Tensor | None = None,
    mods: Mods = NO_MODS,
    results: int = 2,
) -> Callable[..., Result]:
    """`attention` for tensors like these: a function of q, k, v, sink, slopes
    and mods. results: how many of its two the caller reads."""
    batch, q_len, num_heads, k_dim = q.shape
    kv_len, num_kv_heads, v_dim = k.shape[1], k.shape[2], v.shape[3]
    if batch * q_len == 0 or kv_len == 0:
        return _without_keys
    if scale <= 0 or not all(is_addressable(x) for x in (q, k, v)):
        # With new tensors, which need a plan of their own.

        def run_prepared(
            q: Tensor,
            k: Tensor,
            v: Tensor,
            sink: Tensor | None,
            slopes: Tensor | None = None,
            mods: Mods = NO_MODS,
        ) -> Result:
            q, k, v = _prepared(q, k, v, scale)
            options = (left, right, softcap, abs(scale) or 1.0, config, slopes, mods)
            return attention(q, k, v, sink, *options)

        return run_prepared
    changed = (slopes is not None, mods is not NO_MODS)
    unchanged = sink is None and left < 0 and softcap == 0 and not any(changed)
    short = None if config else short_of(k_dim, v_dim, kv_len, unchanged)
    if short is not None:
        fill = bind_short(q, k, v, right, scale, short, multiprocessors(q.device))
        like_out, like_lse = _templates(q, v_dim)

        def run_short(
            q: Tensor,
            k: Tensor,
            v: Tensor,
            sink: Tensor | None,
            slopes: Tensor | None = None,
            mods: Mods = NO_MODS,
        ) -> Result:
            if (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15:
                q, k, v = addressable(q), addressable(k), addressable(v)
                return attention(q, k, v, sink, left, right, softcap, scale)
            out, lse = torch.empty_like(like_out), torch.empty_like(like_lse)
            fill(q, k, v, out, lse)
            return out, lse

        return run_short
    config = config or config_of(k_dim, v_dim, q_len, right, *changed)
    if q.dtype == torch.float16:
        config = config.of_few_bits()
    q_tiles = -(-q_len // config.tile_rows)
    num_tiles = q_tiles * batch * num_heads
    heads, kv_bytes = 1, kv_len * (k_dim + v_dim) * k.element_size()  # of a head
    if right >= 0:
        heads = heads_at_a_time(config.dim, q_len, kv_bytes)
    group_size = num_heads // num_kv_heads
    unequal = (left >= 0 or right >= 0) and q_len > IN_TURN_Q_LEN
    places = multiprocessors(q.device) * config.ctas
    dynamic = (config.dynamic == "always" or (config.dynamic == "unequal" and unequal)) and (
        num_tiles > places
    )
    section = min(heads * group_size, batch * num_heads)
    boxes = _boxes(describe, config, q, k, v)

    def launch_of(ctas: int, num_items: int, section: int, dynamic: bool, split: bool) -> Launch:
        return Launch(
            attention_kernel,
            ctas,
            q.device,
            q.dtype,
            boxes,
            (
                *(0, 0, num_items, num_heads, group_size, q_len, kv_len, q_tiles),
                *(batch * num_heads, section, config.rounds(num_tiles, places)),
                *_numbers(left, right, softcap, scale, results),
            ),
            constants(
                *(config, False, dynamic, left >= 0, right >= 0),
                *(softcap != 0, sink is not None, slopes is not None, k_dim, v_dim),
                *(*mods.functions, 0, split),
            ),
            config.most_registers,
            dependent=config.dependent,
            absent=0 if config.anchored else 2,
        )

    launch = launch_of(min(num_tiles, places), num_tiles, section, dynamic, False)
    (like_out, like_lse), device = _templates(q, v_dim), q.device
    anchored, plain, index = config.anchored, not any(changed), device.index or 0

    def run(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        slopes: Tensor | None = None,
        mods: Mods = NO_MODS,
    ) -> Result:
        at_q, at_k, at_v = q.data_ptr(), k.data_ptr(), v.data_ptr()
        if (at_q | at_k | at_v) & 15:
            q, k, v = addressable(q), addressable(k), addressable(v)
            return attention(q, k, v, sink, left, right, softcap, scale, config, slopes, mods)
        out = torch.empty_like(like_out)
        lse = torch.empty_like(like_lse) if results > 1 else None
        if plain and sink is None and launch.is_ready:
            at_out = out.data_ptr()
            at = 0 if lse is None else lse.data_ptr()
            launch.at(
                (at_q, at_k, at_v, at_out, at_k, at_v) if anchored else (at_q, at_k, at_v, at_out),
                (at, 0, 0, address_of_counter(index) if dynamic else 0, 0, 0, 0, 0),
            )
            return out, lse
        if lse is None:
            lse = torch.empty_like(like_lse)
        bases = (q, k, v, out, k, v) if anchored else (q, k, v, out)
        pointers = (
            lse,
            lse if sink is None else sink.float().contiguous(),
            lse if slopes is None else slopes.float().contiguous(),
            counter(device) if dynamic else lse,
            *(lse, lse, lse, lse),
        )
        if mods is NO_MODS:
            launch(bases, pointers)
        else:
            launch.with_captured(bases, pointers, mods.captured)
        return out, lse

    cut = cut_of(
        *(config, device, batch * num_heads, q_len, kv_len, left, right, places),
        *(right >= 0, kv_bytes * batch * num_kv_heads, section),
    )
    if cut is None or not plain:
        return run
    in_parts = launch_of(cut.ctas, cut.places, 1, False, True)

    def run_in_parts(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        slopes: Tensor | None = None,
        mods: Mods = NO_MODS,
    ) -> Result:
        items = cut.items()
        if items is None or (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15:
            return run(q, k, v, sink)
        if not q.is_cuda and building():  # other lengths of this class need that one
            run(q, k, v, sink)
        out, lse = torch.empty_like(like_out), torch.empty_like(like_lse)
        sinks = lse if sink is None else sink.float().contiguous()
        in_parts(
            (q, k, v, out, k, v) if anchored else (q, k, v, out),
            (lse, sinks, lse, items, lse, lse, cut.new_parts(), counters(device)),
        )
        return out, lse

    return run_in_parts


def bind_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_q_len: int,
    max_kv_len: int,
    sink: Tensor | None,
    left: int,
    right: int,
    softcap: float,
    scale: float,
    config: Config | None = None,
    slopes: Tensor | None = None,
    mods: Mods = NO_MODS,
    results: int = 2,
) -> Callable[..., Result]:
    """`attention_varlen` for tensors like these: a function of q, k, v, the lengths,
    sink, slopes and mods. results: how many of its two the caller reads."""
    tokens, num_heads, k_dim = q.shape
    batch, v_dim = cu_seqlens_q.shape[0] - 1, v.shape[2]
    length = typical_length(tokens, batch, max_q_len)
    config_given = config
    changed = (slopes is not None, mods is not NO_MODS)
    config = config or config_of(k_dim, v_dim, length, right, *changed)
    if q.dtype == torch.float16:
        config = config.of_few_bits()
    if tokens == 0:
        return lambda q, k, v, cu_q, cu_k, sink, *_: _without_keys(q, k, v, sink)
    # A descriptor needs memory, though no row of it may be visible.
    if scale <= 0 or k.shape[0] == 0 or not all(is_addressable(x) for x in (q, k, v)):

        def run_prepared(
            q: Tensor,
            k: Tensor,
            v: Tensor,
            cu_q: Tensor,
            cu_k: Tensor,
            sink: Tensor | None,
            slopes: Tensor | None = None,
            mods: Mods = NO_MODS,
        ) -> Result:
            if k.shape[0] == 0:
                k, v = k.new_zeros(1, *k.shape[1:]), v.new_zeros(1, *v.shape[1:])
            q, k, v = _prepared(q, k, v, scale)
            options = (left, right, softcap, abs(scale) or 1.0, config, slopes, mods)
            return attention_varlen(q, k, v, cu_q, cu_k, 0, 0, sink, *options)

        return run_prepared
    plain = config_given is None and slopes is None and mods is NO_MODS
    if q.is_cuda and plain and min(k_dim, v_dim) >= 32:
        from rooftile.kernels.triton.ragged_pages import (
            follows_plan,
        )  # which only a GPU can run

        if follows_plan(k, v, max_q_len, max_kv_len, num_heads // k.shape[1]):
            return _by_plan(max_q_len, max_kv_len, left, right, softcap, scale)
    # Every sequence, and the padding after the last, ends in at most one tile that is not full.
    capacity = tokens // config.tile_rows + min(batch + 1, tokens)
    device = q.device
    places = multiprocessors(device) * config.ctas
    dynamic = config.dynamic != "never"
    other_q, other_k = (
        x.dtype != torch.int32 or not x.is_contiguous() for x in (cu_seqlens_q, cu_seqlens_k)
    )
    few = batch < config.most_sorted and capacity < MOST_TILES_SORTED
    most_sorted = config.most_sorted if few else 0
    list_tiles = None
    if not most_sorted:
        list_tiles = Launch(
            list_tiles_kernel,
            batch + 1,
            device,
            torch.int32,
            (),
            (batch, tokens),
            (("tile_rows", config.tile_rows),),
        )
    boxes = _boxes(describe_ragged, config, q, k, v)

    def launch_of(ctas: int, num_items: int, dynamic: bool, split: bool) -> Launch:
        return Launch(
            attention_kernel,
            ctas,
            device,
            q.dtype,
            boxes,
            (
                *(batch, tokens, num_items, num_heads, num_heads // k.shape[1], 0, k.shape[0]),
                *(0, 0, 0, 1),
                *_numbers(left, right, softcap, scale, results),
            ),
            constants(
                *(config, True, dynamic, left >= 0, right >= 0),
                *(softcap != 0, sink is not None, slopes is not None, k_dim, v_dim),
                *(*mods.functions, most_sorted, split),
            ),
            config.most_registers,
            dependent=config.dependent,
            absent=0 if config.anchored else 2,
        )

    attend = launch_of(min(capacity * num_heads, places), 0, dynamic, False)
    like_out, like_lse = _templates(q, v_dim)
    anchored, direct = config.anchored, not (list_tiles or any(changed))
    index = device.index or 0
    like_entries = q.new_empty(1, dtype=torch.int32).expand(1 + capacity, NUM_FIELDS)

    def run(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_q: Tensor,
        cu_k: Tensor,
        sink: Tensor | None,
        slopes: Tensor | None = None,
        mods: Mods = NO_MODS,
    ) -> Result:
        at_q, at_k, at_v = q.data_ptr(), k.data_ptr(), v.data_ptr()
        if (at_q | at_k | at_v) & 15:
            q, k, v = addressable(q), addressable(k), addressable(v)
            options = (left, right, softcap, scale, config, slopes, mods)
            return attention_varlen(q, k, v, cu_q, cu_k, 0, 0, sink, *options)
        out = torch.empty_like(like_out)
        lse = torch.empty_like(like_lse) if results > 1 else None
        if other_q:
            cu_q = cu_q.to(torch.int32).contiguous()
        if other_k:
            cu_k = cu_k.to(torch.int32).contiguous()
        if direct and sink is None and attend.is_ready:
            at_out = out.data_ptr()
            at = 0 if lse is None else lse.data_ptr()
            entry = address_of_counter(index) if dynamic else 0
            attend.at(
                (at_q, at_k, at_v, at_out, at_k, at_v) if anchored else (at_q, at_k, at_v, at_out),
                (at, 0, 0, entry, cu_q.data_ptr(), cu_k.data_ptr(), 0, 0),
            )
            return out, lse
        if lse is None:
            lse = torch.empty_like(like_lse)
        if list_tiles is None:
            entries = counter(device) if dynamic else lse
        else:
            entries = torch.empty_like(like_entries)
            list_tiles((), (entries, cu_q, cu_k))
        bases = (q, k, v, out, k, v) if anchored else (q, k, v, out)
        pointers = (
            lse,
            lse if sink is None else sink.float().contiguous(),
            lse if slopes is None else slopes.float().contiguous(),
            *(entries, cu_q, cu_k, lse, lse),
        )
        if mods is NO_MODS:
            attend(bases, pointers)
        else:
            attend.with_captured(bases, pointers, mods.captured)
        return out, lse

    # Of one sequence the host knows the lengths, unless there is padding behind it.
    if batch != 1 or any(changed) or max_q_len < tokens or max_kv_len < k.shape[0]:
        return run
    kv_bytes = k.shape[0] * k.shape[1] * (k_dim + v_dim) * k.element_size()
    cut = cut_of(config, device, num_heads, tokens, k.shape[0], left, right, places, True, kv_bytes)
    if cut is None:
        return run
    if right >= 0:
        cut.number_across_heads(-(-tokens // config.tile_rows), num_heads)
    in_parts = launch_of(cut.ctas, cut.places, False, True)

    def run_in_parts(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_q: Tensor,
        cu_k: Tensor,
        sink: Tensor | None,
        slopes: Tensor | None = None,
        mods: Mods = NO_MODS,
    ) -> Result:
        items = cut.items()
        if items is None or (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15:
            return run(q, k, v, cu_q, cu_k, sink)
        if not q.is_cuda and building():
            run(q, k, v, cu_q, cu_k, sink)
        out, lse = torch.empty_like(like_out), torch.empty_like(like_lse)
        cu_q = cu_q.to(torch.int32).contiguous() if other_q else cu_q
        cu_k = cu_k.to(torch.int32).contiguous() if other_k else cu_k
        sinks = lse if sink is None else sink.float().contiguous()
        in_parts(
            (q, k, v, out, k, v) if anchored else (q, k, v, out),
            (lse, sinks, lse, items, cu_q, cu_k, cut.new_parts(), counters(device)),
        )
        return out, lse

    return run_in_parts


def _by_plan(
    max_q_len: int, max_kv_len: int, left: int, right: int, softcap: float, scale: float
) -> Callable[..., Result]:
    """Few queries over many keys: the kernel for pages, which packs heads and shares keys out."""
    from rooftile.kernels.gluon.paged import paged_attention
    from rooftile.kernels.triton.ragged_pages import lengths_and_table, pages_of

    def run(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_q: Tensor,
        cu_k: Tensor,
        sink: Tensor | None,
        *_: Any,
    ) -> Result:
        kv_lens, table = lengths_and_table(cu_k, max_kv_len)
        pages = (pages_of(addressable(k)), pages_of(addressable(v)))
        return paged_attention(
            *(
                q,
                *pages,
                cu_q,
                kv_lens,
                table,
                max_q_len,
                max_kv_len,
                sink,
                left,
                right,
            ),
            *(softcap, scale, None, None, False, None, []),
        )

    return run


def _templates(q: Tensor, v_dim: int) -> tuple[Tensor, Tensor]:
    """Tensors of one element that `torch.empty_like` makes an output and an lse from: of all ways
    to allocate, the one that costs the host least."""
    shape = q.shape[:-1]
    one = q.new_empty(1, dtype=torch.float32)
    return one.to(q.dtype).expand(*shape, v_dim), one.expand(shape)


def _boxes(
    described: Callable[[Tensor, int, int], Box], config: Config, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Box, ...]:
    """Of q, k, v and the output, and of k and v in a second pass."""
    dim, k_dim, v_dim = config.dim, k.shape[-1], v.shape[-1]
    return (
        described(q, 64, box_columns(dim, k_dim)),
        described(k, config.block, box_columns(dim, k_dim)),
        described(v, config.block, box_columns(dim, v_dim)),
        described(q.new_empty(*q.shape[:-1], v_dim), 64, dim),
        *(described(x, AGAIN_ROWS, dim) for x in (k, v) if config.anchored),
    )


def _numbers(
    left: int, right: int, softcap: float, scale: float, results: int
) -> tuple[int | float | tuple[()], ...]:
    """The options as the kernel takes them."""
    return (
        *(min(left, UNBOUNDED), min(right, UNBOUNDED), results - 1),
        # With a cap, what goes into tanh, and the log2 units that come out.
        scale / softcap if softcap else scale * _LOG2_E,
        softcap * _LOG2_E,
        *((), ()),  # what functions of the caller take: see `with_captured`
    )


def _without_keys(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, *_: Any) -> Result:
    out = q.new_zeros(*q.shape[:-1], v.shape[-1])
    lse = q.new_full(q.shape[:-1], -torch.inf, dtype=torch.float32)
    return out, lse if sink is None else lse.copy_(sink.expand_as(lse))


def _prepared(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Tensors that the copy engine can address, for a positive scale: the row maximum is taken of
    raw scores."""
    if scale <= 0:
        q = -q if scale < 0 else q * 0
    return addressable(q), addressable(k), addressable(v)


def supports(call: Any) -> str | None:
    if call.device != "cuda":
        return f"it needs an NVIDIA GPU of compute capability 9.0, not a {call.device}"
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        return f"it is for compute capability 9.0, this GPU has {capability[0]}.{capability[1]}"
    if call.dtype not in (torch.bfloat16, torch.float16):
        return f"it takes bfloat16 and float16, not {call.dtype}"
    largest = max(CONFIGS)
    for name, dim in (("k_dim", call.k_dim), ("v_dim", call.v_dim)):
        if dim % 8 or dim > largest:
            return f"{name} is {dim}; it takes multiples of 8 up to {largest}"
    if call.page_size:
        return "it reads dense and ragged keys, not pages"
    return None
