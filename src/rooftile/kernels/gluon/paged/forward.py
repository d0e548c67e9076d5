"""From an operator's arguments to launches: descriptors, partial buffers, the plan's places."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from rooftile.kernels.gluon.launch import Launch, multiprocessors
from rooftile.kernels.gluon.paged.config import (
    LARGE,
    SHARED_ITEM_COST,
    SHARED_ROWS,
    UNBOUNDED,
    Config,
    anchored_from,
    config_of,
    has_few_keys,
    of_pages,
)
from rooftile.kernels.gluon.paged.kernel import constants, paged_kernel
from rooftile.kernels.gluon.tile.pages import describe_packed, describe_pages, page_pitch
from rooftile.kernels.gluon.tile.policy import say_policies
from rooftile.kernels.gluon.tile.rows import addressable, is_addressable
from rooftile.planning.split_cost import LEAST_SAVED
from rooftile.planning.split_kv import Layout
from rooftile.types import SplitSpec

_LOG2_E = 1.4426950408889634
_CLOCKS_A_BYTE = 1 / 19  # of one SM's share of the memory's rate
Result = tuple[Tensor, Tensor]
_MOST_KINDS = 4096
_runs: dict[Any, Callable[..., Result]] = {}


def paged_attention(
    q: Tensor,  # [tokens, num_q_heads, k_dim]
    k_pages: Tensor,  # [num_pages, num_kv_heads, page_size, k_dim]
    v_pages: Tensor,  # [num_pages, num_kv_heads, page_size, v_dim]
    cu_seqlens_q: Tensor,  # [batch + 1]
    kv_lens: Tensor,  # [batch]
    page_table: Tensor,  # [batch, max_pages]
    max_q_len: int,
    max_kv_len: int,
    sink: Tensor | None,  # [num_q_heads]
    left: int,
    right: int,
    softcap: float,
    scale: float,
    k_scale: Tensor | None,  # [num_kv_heads]
    v_scale: Tensor | None,  # [num_kv_heads]
    batch_invariant: bool,
    plan: Tensor | None,
    split: list[int],
    with_lse: bool = True,
    config: Config | None = None,
    chunk_len: int = 0,
) -> Result:  # [tokens, num_q_heads, v_dim], [tokens, num_q_heads]
    """with_lse: whether anybody reads the lse; otherwise it may be left unwritten.
    chunk_len: of dual chunk attention, whole KV tiles. Then q has the three rotations of all tokens
    one after the other, [3 * tokens, ...], and a request's queries lie in the chunk of its last key.
    """
    batch = kv_lens.shape[0]
    tokens = q.shape[0] // (3 if chunk_len else 1)
    if q.shape[0] == 0 or batch == 0 or k_pages.shape[0] == 0:
        return _nothing(q[:tokens], v_pages, cu_seqlens_q, sink)
    if scale <= 0:  # the row maximum is taken of raw scores, which needs a positive scale
        q, scale = (-q, -scale) if scale < 0 else (q * 0, 1.0)
    q = addressable(q)
    if page_pitch(k_pages) is None or k_pages.data_ptr() % 16:
        k_pages = k_pages.contiguous().clone()
    if page_pitch(v_pages) is None or v_pages.data_ptr() % 16:
        v_pages = v_pages.contiguous().clone()
    page_table = _by_rows(page_table)
    config, split = _choices(
        *(q, k_pages, v_pages, batch, tokens, max_q_len, max_kv_len, left, right),
        *(batch_invariant, split, config),
    )
    if plan is None:
        plan = _planned(cu_seqlens_q, kv_lens, split)
    run = _run_of(
        *(q, k_pages, v_pages, page_table, sink, left, right, softcap, scale),
        *(split, config, chunk_len, with_lse),
    )
    return run(
        *(q, k_pages, v_pages, cu_seqlens_q.to(torch.int32), page_table),
        *(sink, k_scale, v_scale, plan),
    )


def bind(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    cu_seqlens_q: Tensor,
    kv_lens: Tensor,
    page_table: Tensor,
    max_q_len: int,
    max_kv_len: int,
    sink: Tensor | None,
    left: int,
    right: int,
    softcap: float,
    scale: float,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    batch_invariant: bool,
    plan: Tensor | None,
    split: list[int],
    with_lse: bool = True,
    results: int = 2,
) -> Callable[..., Result]:
    """`paged_attention` as a function of its tensors alone, for those of the same kind."""

    def in_general(
        q: Tensor, k_pages: Tensor, v_pages: Tensor, cu_q: Tensor, kv_lens: Tensor, table: Tensor,
        sink: Tensor | None, k_scale: Tensor | None, v_scale: Tensor | None, plan: Tensor | None,
    ) -> Result:  # fmt: skip
        sink, k_scale, v_scale = (
            x if x is None else x.contiguous() for x in (sink, k_scale, v_scale)
        )
        options: tuple[Any, ...] = (sink, left, right, softcap, scale, k_scale, v_scale)
        return paged_attention(
            *(q, k_pages, v_pages, cu_q.contiguous(), kv_lens.contiguous(), table),
            *(max_q_len, max_kv_len),
            *(*options, batch_invariant, plan, split, with_lse),
        )

    vectors = (cu_seqlens_q, kv_lens, sink, k_scale, v_scale)
    if (
        0 in (q.shape[0], kv_lens.shape[0], k_pages.shape[0])
        or scale <= 0
        or not is_addressable(q)
        or page_pitch(k_pages) is None
        or page_pitch(v_pages) is None
        or not all(x is None or x.is_contiguous() for x in vectors)
    ):
        return in_general
    config, numbers = _choices(
        *(q, k_pages, v_pages, kv_lens.shape[0], q.shape[0], max_q_len, max_kv_len, left, right),
        *(batch_invariant, split, None),
    )
    run = _run_of(
        *(q, k_pages, v_pages, _by_rows(page_table), sink, left, right, softcap, scale),
        *(numbers, config, 0, with_lse),
    )

    def bound(
        q: Tensor, k_pages: Tensor, v_pages: Tensor, cu_q: Tensor, kv_lens: Tensor, table: Tensor,
        sink: Tensor | None, k_scale: Tensor | None, v_scale: Tensor | None, plan: Tensor | None,
    ) -> Result:  # fmt: skip
        if (q.data_ptr() | k_pages.data_ptr() | v_pages.data_ptr()) & 15:
            tensors = (q, k_pages, v_pages, cu_q, kv_lens, table, sink, k_scale, v_scale, plan)
            return in_general(*tensors)
        if plan is None:
            plan = _planned(cu_q, kv_lens, numbers)
        cu_q, table = cu_q.to(torch.int32), _by_rows(table)
        return run(q, k_pages, v_pages, cu_q, table, sink, k_scale, v_scale, plan)

    return bound


def _by_rows(table: Tensor) -> Tensor:  # [batch, max_pages]
    """A page table as kernels read it: int32, the entries of a row side by side."""
    table = table.to(torch.int32)
    return table if table.stride(1) == 1 else table.contiguous()


def _choices(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: int, tokens: int, max_q_len: int, max_kv_len: int,
    left: int, right: int, batch_invariant: bool, split: list[int], config: Config | None,
) -> tuple[Config, list[int]]:  # fmt: skip
    """Of a call: tile sizes, and how it is split where no plan says so."""
    num_heads, num_kv_heads, dims = q.shape[1], k_pages.shape[1], (q.shape[2], v_pages.shape[3])
    quantised = k_pages.dtype != q.dtype
    spec = _spec_of(*split) if split else None
    if spec:  # which says how a strip is cut, and so of which tiles
        batch_invariant = spec.piece > 0
    rows = _most_rows(num_heads // num_kv_heads, max_q_len, tokens if spec and spec.groups else 0)
    longest = (spec.max_q_len, spec.max_kv_len) if spec else (max_q_len, max_kv_len)
    config = config or config_of(
        *(*dims, rows, quantised, batch_invariant, batch * num_kv_heads),
        has_few_keys(q.dtype, *longest),
    )
    if split:
        return config, split
    capacities = (batch, tokens, max_q_len, max_kv_len)
    shapes = (num_heads, num_kv_heads, *dims, quantised, left, right, batch_invariant)
    return config, _spec(config, _ctas(q.device.type), *shapes, *capacities).numbers


def _run_of(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    sink: Tensor | None,
    left: int,
    right: int,
    softcap: float,
    scale: float,
    split: list[int],
    config: Config,
    chunk_len: int,
    with_lse: bool,
) -> Callable[..., Result]:
    """`_kind_of_call`, made once."""
    options = (left, right, softcap, scale, sink is None, config, chunk_len, with_lse, *split)
    kind = (
        *(q.shape, q.stride(), q.dtype, q.device, k_pages.shape, k_pages.stride()),
        *(k_pages.dtype, v_pages.shape, v_pages.stride(), page_table.stride(0), options),
    )
    run = _runs.get(kind)
    if run is None:
        if len(_runs) >= _MOST_KINDS:
            _runs.clear()
        run = _runs[kind] = _kind_of_call(
            *(q, k_pages, v_pages, page_table, sink, left, right, softcap, scale),
            *(_spec_of(*split), config, chunk_len, with_lse),
        )
    return run


def _planned(cu_seqlens_q: Tensor, kv_lens: Tensor, split: list[int]) -> Tensor:
    from rooftile.kernels.triton.split_kv import split_kv  # which only a GPU can run

    plan: Tensor = split_kv(cu_seqlens_q, kv_lens, split)
    return plan


def _kind_of_call(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    sink: Tensor | None,
    left: int,
    right: int,
    softcap: float,
    scale: float,
    spec: SplitSpec,
    config: Config,
    chunk_len: int,
    with_lse: bool,
) -> Callable[..., Result]:
    """Everything that does not depend on where tensors lie, once for each kind of call."""
    rotations = 3 if chunk_len else 1
    tokens, num_heads, k_dim = q.shape[0] // rotations, *q.shape[1:]
    num_kv_heads, page_size, v_dim = k_pages.shape[1], k_pages.shape[2], v_pages.shape[3]
    group_size = num_heads // num_kv_heads
    layout = Layout(spec)
    with_lse = with_lse or spec.groups > 0  # who joins shared prefixes writes it
    device = q.device
    quantised = k_pages.dtype != q.dtype
    block = config.block
    if not chunk_len:  # whose rotations of queries come one after the other
        config = of_pages(config, page_size, spec.max_q_len)
    if q.dtype != torch.bfloat16 or chunk_len or spec.max_q_len < anchored_from(config, right):
        config = replace(config, anchored=False)
    # Packed rows are boxes where a group is a power of two; else they are gathered, and the boxes
    # only say what a tile of Q consists of.
    rows = config.few or 64
    boxes = rows % group_size == 0 and not (config.few and quantised)
    q_box = describe_packed(q, group_size if boxes else 1, rows)
    o_box = describe_packed(q.new_empty(tokens, num_heads, v_dim), group_size if boxes else 1, rows)
    packed = group_size if boxes else 0
    attend = Launch(
        paged_kernel,
        min(spec.num_ctas, _ctas(device.type) * config.ctas) if config.drawn else spec.num_ctas,
        device,
        q.dtype,
        (q_box, describe_pages(k_pages, block), describe_pages(v_pages, block), o_box),
        (
            *(spec.batch, spec.num_ctas, tokens, layout.ctas, layout.merges, layout.items),
            page_table.stride(0),
            *(page_pitch(k_pages) or 0, page_pitch(v_pages) or 0),
            *(k_pages.stride(2), v_pages.stride(2), k_pages.stride(1), v_pages.stride(1)),
            *(q.stride(0), q.stride(1)),
            *(group_size, num_heads, k_dim // 8, v_dim // 8),
            *(min(left, UNBOUNDED), min(right, UNBOUNDED)),
            # With a cap, what goes into tanh, and the log2 units that come out.
            scale / softcap if softcap else scale * _LOG2_E,
            softcap * _LOG2_E,
            chunk_len // block,
            int(with_lse),
        ),
        constants(
            *(
                config,
                page_size,
                packed,
                group_size if group_size & (group_size - 1) == 0 else 0,
                quantised,
                left >= 0,
                right >= 0,
                softcap != 0,
                sink is not None,
                rotations,
                spec.groups > 0 and say_policies(),
            )
        ),
        most_registers=config.most_registers,
        dependent=True,
    )
    partial_rows = max(layout.partial_rows, 1)
    # Allocating like a tensor of one element costs the host half of what `new_empty` does.
    one = q.new_empty(1, dtype=torch.float32)
    like_out, like_lse = (
        one.to(q.dtype).expand(tokens, num_heads, v_dim),
        one.expand(tokens, num_heads),
    )
    like_parts, like_part_lse = one.expand(partial_rows, v_dim), one.expand(partial_rows)

    def run(
        q: Tensor, k_pages: Tensor, v_pages: Tensor, cu_q: Tensor, table: Tensor,
        sink: Tensor | None, k_scale: Tensor | None, v_scale: Tensor | None, plan: Tensor,
    ) -> Result:  # fmt: skip
        out, lse = torch.empty_like(like_out), torch.empty_like(like_lse)
        parts, part_lse = torch.empty_like(like_parts), torch.empty_like(like_part_lse)
        sinks = lse if sink is None else sink.float()
        scales = [lse if x is None else x.float() for x in (k_scale, v_scale)]
        attend(
            (q, k_pages, v_pages, out),
            (q, out, lse, parts, part_lse, sinks, *scales, k_pages, v_pages, plan, table, cu_q),
        )
        if spec.groups:
            from rooftile.kernels.triton.merge import merge_shared

            merge_shared(plan, spec, parts, part_lse, sink, out, lse, planned=True)
        return out, lse

    return run


def _nothing(q: Tensor, v_pages: Tensor, cu_q: Tensor, sink: Tensor | None) -> Result:
    """No request, no token or no page: rows of requests see at most the sink, padding nothing."""
    out = q.new_zeros(*q.shape[:2], v_pages.shape[3])
    lse = q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)
    if sink is not None:
        rows = torch.arange(q.shape[0], device=q.device) < cu_q[-1]
        lse = torch.where(rows[:, None], sink.float(), lse)
    return out, lse


def split(
    call: Any,
    batch: int,
    tokens: int,
    max_q_len: int,
    max_kv_len: int,
    groups: int = 0,
    config: Config | None = None,
) -> SplitSpec:
    """How the kernel wants a call to be split; batch to groups are capacities."""
    quantised = call.kv_dtype is not None
    rows = _most_rows(call.num_q_heads // call.num_kv_heads, max_q_len, tokens if groups else 0)
    config = config or config_of(
        *(call.k_dim, call.v_dim, rows, quantised, call.batch_invariant, batch * call.num_kv_heads),
        has_few_keys(call.dtype, max_q_len, max_kv_len),
    )
    spec = _spec(
        *(config, _ctas(call.device), call.num_q_heads, call.num_kv_heads, call.k_dim, call.v_dim),
        *(quantised, call.left, call.right, call.batch_invariant),
        *(batch, tokens, max_q_len, max_kv_len),
    )
    if not groups:
        return spec
    return replace(spec, groups=groups, least_saved=LEAST_SAVED, item_cost=SHARED_ITEM_COST)


def _most_rows(group_size: int, max_q_len: int, sharing_tokens: int) -> int:
    """Packed rows that a query tile is to hold: of a request, or of requests that share a prefix."""
    if sharing_tokens:
        return min(sharing_tokens * group_size, SHARED_ROWS)
    return max_q_len * group_size


@lru_cache(maxsize=_MOST_KINDS)
def _spec_of(*split: int) -> SplitSpec:
    return SplitSpec.from_numbers(split)


def _spec(
    config: Config, processors: int, num_heads: int, num_kv_heads: int, k_dim: int, v_dim: int,
    quantised: bool, left: int, right: int, batch_invariant: bool,
    batch: int, tokens: int, max_q_len: int, max_kv_len: int,
) -> SplitSpec:  # fmt: skip
    tile_bytes = config.block * (k_dim + v_dim) * (1 if quantised else 2)
    tile_cost = max(int(tile_bytes * _CLOCKS_A_BYTE) * config.ctas, 1)
    most_rows = max_q_len * (num_heads // num_kv_heads)
    return SplitSpec(
        batch=batch,
        tokens=tokens,
        max_q_len=max_q_len,
        max_kv_len=max_kv_len,
        group_size=num_heads // num_kv_heads,
        num_kv_heads=num_kv_heads,
        left=left,
        right=right,
        kv_tile=config.block,
        tile_rows=config.tile_rows,
        tile_cost=(tile_cost,) * len(config.tile_rows),
        item_cost=config.item_cost,
        num_ctas=_even(processors * config.ctas)
        if config.groups == 1
        else processors * config.ctas,
        min_piece=config.min_piece,
        piece=_PIECE if batch_invariant else 0,
        whole=_WHOLE if config.drawn and most_rows > config.tile_rows[-1] else 0,
        together=_together(num_kv_heads * (k_dim + v_dim) * max_kv_len * 2) if right >= 0 else 1,
    )


def _together(kv_bytes: int) -> int:
    """Requests, of so many bytes of keys and values each, whose strips stand side by side.

    H200, d64 causal, us with one request at a time and with sections of 8, 12 and 24 MiB: b16 s1024 page 64
    171 168 166 168, page 16 177 - 172 174; b8 s2048 281 275 272 275, 290 284 285 284. d128: the same.
    """
    return max(1, min(_SECTION_BYTES // max(kv_bytes, 1), _MOST_TOGETHER))


def _even(ctas: int) -> int:
    """A few CTAs less, where a power of two divides more of their number.

    It often divides the number of requests and kv heads too: shares then end where strips end, which
    spares merging, and memory is as busy. H200, us with 256 and 264: b32 4k 127.7 131.2, b8 8k 70.9 72.8.
    """
    over = ctas % _EVEN
    return ctas - over if over * 16 <= ctas else ctas


_EVEN = 64
_PIECE = 32  # KV tiles of a fixed piece
_SECTION_BYTES = 12 * 2**20
_MOST_TOGETHER = 16
_WHOLE = 3  # of the costliest strip in a CTA's share


@cache
def _ctas(device: str) -> int:
    return multiprocessors(torch.device(device, torch.cuda.current_device()))


def supports(call: Any) -> str | None:
    if call.device != "cuda":
        return f"it needs an NVIDIA GPU of compute capability 9.0, not a {call.device}"
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        return f"it is for compute capability 9.0, this GPU has {capability[0]}.{capability[1]}"
    if call.dtype not in (torch.bfloat16, torch.float16):
        return f"it takes bfloat16 and float16, not {call.dtype}"
    if call.kv_dtype not in (None, torch.float8_e4m3fn):
        return f"it takes pages of q's dtype or float8_e4m3fn, not {call.kv_dtype}"
    largest = max(LARGE)
    for name, dim in (("k_dim", call.k_dim), ("v_dim", call.v_dim)):
        step = 8 if call.kv_dtype is None else 16
        if dim % step or not 32 <= dim <= largest:
            return f"{name} is {dim}; it takes multiples of {step} from 32 to {largest}"
    if call.page_size < 8 or call.page_size & (call.page_size - 1):
        return f"page_size is {call.page_size}; it takes powers of two from 8 on"
    return None
