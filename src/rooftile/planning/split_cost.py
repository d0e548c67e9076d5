"""What split attention costs a CTA, in clocks: the numbers that plans are made with."""

from __future__ import annotations

from rooftile.planning.decode_case import DecodeCase
from rooftile.planning.hardware import H200, Machine
from rooftile.types import SplitSpec

# Before an item's first keys arrive and after its last: about 1.4 us, what fits the decode table.
ITEM_CLOCKS = 2500
# Keys that a group of requests must spare reading, below which merging takes longer than they do.
LEAST_SAVED = 1024
SHARED_ROWS = 128  # query tiles of this size belong to requests whose tiles share their keys


def tile_clocks(rows: int, block: int, dims: int, itemsize: int, machine: Machine = H200) -> int:
    """A KV tile of `block` keys under `rows` query rows; dims: of keys and values together.

    Reading it while all units read, or computing, whichever is more. Large query tiles find in
    the cache half of what they read: their neighbours have read it.
    """
    read = block * dims * itemsize * machine.units * machine.clock / machine.bandwidth
    if rows >= SHARED_ROWS:
        read /= 2
    # Half of the matrix rate is what attention reaches with its exponentials in between.
    product = 2 * rows * block * dims / (machine.matrix_flops_per_clock / 2)
    return round(max(read, product + rows * block / machine.exps_per_clock))


def split_spec(
    case: DecodeCase,
    machine: Machine,
    *,
    block: int = 64,
    tile_rows: tuple[int, ...] = (16, 64, 128),
) -> SplitSpec:
    """How a GPU kernel would want `case` to be split, one CTA on each unit."""
    most = max(case.q_lens) * case.group_size
    rows = tile_rows[: 1 + next((i for i, n in enumerate(tile_rows) if n >= most), len(tile_rows))]
    return SplitSpec(
        batch=len(case.q_lens),
        tokens=sum(case.q_lens),
        max_q_len=max(case.q_lens),
        max_kv_len=max(case.kv_lens),
        group_size=case.group_size,
        num_kv_heads=case.num_kv_heads,
        left=case.window,
        right=0,
        kv_tile=block,
        tile_rows=rows,
        tile_cost=tuple(
            tile_clocks(n, block, case.k_dim + case.v_dim, case.kv_itemsize, machine) for n in rows
        ),
        item_cost=ITEM_CLOCKS,
        num_ctas=machine.units,
        min_piece=2,
    )
