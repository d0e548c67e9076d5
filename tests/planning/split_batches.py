"""Random specs and lengths of split attention, shared by the tests of every planner."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from rooftile.types import SplitSpec

Lengths = list[tuple[int, int]]  # query, keys
Q_LENS = st.one_of(st.just(1), st.integers(0, 5), st.integers(0, 70))
KV_LENS = st.one_of(st.integers(0, 40), st.sampled_from([0, 1, 63, 64, 65, 128, 500, 3000]))
SIDES = st.sampled_from([-1, -1, 0, 1, 17, 128])
# Query tile sizes with the costs of a KV tile.
TILES = st.sampled_from(
    [((16,), (100,)), ((16, 64), (100, 150)), ((16, 32, 128), (30, 30, 90)), ((128,), (70,))]
)


@st.composite
def batches(draw: st.DrawFn) -> tuple[SplitSpec, Lengths]:
    lengths = draw(st.lists(st.tuples(Q_LENS, KV_LENS), max_size=12))
    slack = draw(st.sampled_from([0, 0, 3]))
    tile_rows, tile_cost = draw(TILES)
    spec = SplitSpec(
        batch=len(lengths) + slack,
        tokens=sum(q for q, _ in lengths) + slack,
        max_q_len=max([q for q, _ in lengths] + [0]) + slack,
        max_kv_len=max([kv for _, kv in lengths] + [0]) + slack,
        group_size=draw(st.sampled_from([1, 4, 5, 7, 12, 128])),
        num_kv_heads=draw(st.integers(1, 3)),
        left=draw(SIDES),
        right=draw(st.sampled_from([0, 0, -1, 9])),
        kv_tile=draw(st.sampled_from([16, 64, 128])),
        tile_rows=tile_rows,
        tile_cost=tile_cost,
        item_cost=draw(st.sampled_from([1, 80, 700])),
        num_ctas=draw(st.sampled_from([1, 2, 5, 33, 132])),
        min_piece=draw(st.integers(1, 3)),
        piece=draw(st.sampled_from([0, 0, 1, 4])),
        whole=draw(st.sampled_from([0, 0, 1, 3])),
        together=draw(st.sampled_from([1, 2, 5])),
    )
    return spec, lengths


@st.composite
def decode_batches(draw: st.DrawFn) -> tuple[SplitSpec, Lengths]:
    """Requests of one query tile each: what decoding and speculation plan."""
    spec, _ = draw(batches())
    group_size = draw(st.sampled_from([1, 4, 5, 7, 16]))
    most = max(1, spec.tile_rows[-1] // group_size)
    q_lens = st.one_of(st.just(1), st.integers(0, most))
    kv_lens = st.one_of(KV_LENS, st.integers(0, 20_000))
    lengths = draw(st.lists(st.tuples(q_lens, kv_lens), max_size=40))
    spec = replace(
        spec,
        batch=len(lengths) + draw(st.sampled_from([0, 0, 3])),
        tokens=sum(q for q, _ in lengths),
        max_q_len=max([q for q, _ in lengths] + [0]),
        max_kv_len=max([kv for _, kv in lengths] + [0]),
        group_size=group_size,
        piece=0,
        whole=0,
    )
    return spec, lengths


Prefixes = tuple[list[int], list[int]]  # first [groups + 1], shared [groups]


@st.composite
def sharing_batches(draw: st.DrawFn) -> tuple[SplitSpec, Lengths, Prefixes]:
    """Batches of one query tile a request, in groups whose members begin with the same keys."""
    spec, _ = draw(decode_batches())
    most = max(1, spec.tile_rows[-1] // spec.group_size)
    lengths: Lengths = []
    first, shared = [0], []
    for _ in range(draw(st.integers(0, 5))):
        keys = draw(st.one_of(st.just(0), st.integers(0, 3000)))
        for _ in range(draw(st.integers(0, 9))):
            q_len = draw(st.one_of(st.just(1), st.integers(0, most)))
            lengths.append((q_len, keys + q_len + draw(st.integers(0, 400))))
        first.append(len(lengths))
        shared.append(keys)
    idle = draw(st.sampled_from([0, 0, 3]))
    spec = replace(
        spec,
        batch=len(lengths) + idle,
        tokens=sum(q for q, _ in lengths) + idle,
        max_q_len=max([q for q, _ in lengths] + [0]),
        max_kv_len=max([kv for _, kv in lengths] + [0]),
        left=-1,
        groups=max(1, len(shared)),
        least_saved=draw(st.sampled_from([0, 0, 500])),
    )
    return spec, lengths, (first, shared)
