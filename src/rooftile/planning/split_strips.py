"""Whose keys are attended by what strips: the line that plans of paged attention cut (split_kv.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rooftile.types import SplitSpec


class Queries(NamedTuple):
    """Whose rows strips are: a request's, or those of a group over what its members share."""

    request: int
    q_begin: int
    q_len: int
    kv_len: int
    skipped: int = 0  # of a request: KV tiles that its group attends
    shared: int = 0  # of a group: KV tiles
    group: int = -1  # that shares tiles


class Strip(NamedTuple):
    """A strip, or a fixed piece of one."""

    queries: Queries
    kv_head: int
    query_tile: int
    piece: int  # counted from the request's first
    pieces: int  # that the whole strip has
    row_begin: int
    row_end: int
    tile_rows: int
    tile_cost: int
    kv_begin: int
    kv_end: int
    cost: int

    @property
    def request(self) -> int:
        return self.queries.request


def everyone(
    spec: SplitSpec,
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    first: Sequence[int] = (),
    shared: Sequence[int] = (),
) -> list[Queries]:
    """All requests, then the groups that attend a prefix once."""
    q_begins = [sum(q_lens[:request]) for request in range(len(q_lens) + 1)]
    requests = [
        Queries(r, q_begins[r], q_len, kv_len)
        for r, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True))
    ]
    groups = []
    for group, (begin, end, keys) in enumerate(zip(first, first[1:], shared, strict=False)):
        tiles = keys // spec.kv_tile
        begin, end = min(begin, len(q_lens)), min(end, len(q_lens))
        if not tiles or (end - begin - 1) * tiles * spec.kv_tile < spec.least_saved:
            continue
        tokens = q_begins[end] - q_begins[begin]
        keys = tiles * spec.kv_tile + tokens
        groups.append(Queries(begin, q_begins[begin], tokens, keys, shared=tiles, group=group))
        for r in range(begin, end):
            requests[r] = requests[r]._replace(skipped=tiles, group=group)
    return requests + groups


def strips(
    spec: SplitSpec,
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    first: Sequence[int] = (),
    shared: Sequence[int] = (),
) -> list[Strip]:
    """All strips in the order of the line."""
    line = []
    for queries in everyone(spec, q_lens, kv_lens, first, shared):
        q_len, kv_len = queries.q_len, queries.kv_len
        rows = q_len * spec.group_size
        size = next((i for i, n in enumerate(spec.tile_rows) if n >= rows), len(spec.tile_rows) - 1)
        tile, tile_cost = spec.tile_rows[size], spec.tile_cost[size]
        pieces, first_piece = 1, 0
        if spec.piece:
            first_key = min(max(kv_len - q_len - spec.left, 0), kv_len) if spec.left >= 0 else 0
            first_piece = first_key // (spec.kv_tile * spec.piece)
            pieces = max(1, -(-kv_len // (spec.kv_tile * spec.piece)) - first_piece)
        heads, tiles = range(spec.num_kv_heads), range(-(-rows // tile))
        if queries.shared:
            order = [(kv_head, query_tile) for kv_head in heads for query_tile in tiles]
        else:
            order = [(kv_head, query_tile) for query_tile in reversed(tiles) for kv_head in heads]
        for kv_head, query_tile in order:
            row_begin = query_tile * tile
            row_end = min(row_begin + tile, rows)
            begin, end = visible_tiles(spec, q_len, kv_len, row_begin, row_end)
            if queries.shared:
                begin, end = 0, queries.shared
            begin = max(begin, queries.skipped)
            for piece in range(pieces):
                a, b = begin, end
                if spec.piece:
                    a = max(a, (first_piece + piece) * spec.piece)
                    b = min(b, (first_piece + piece + 1) * spec.piece)
                a, b = (a, b) if a < b else (0, 0)
                cost = spec.item_cost + (b - a) * tile_cost
                line.append(
                    Strip(queries, kv_head, query_tile, piece, pieces, row_begin, row_end, tile,
                          tile_cost, a, b, cost)
                )  # fmt: skip
    return line


def visible_tiles(
    spec: SplitSpec, q_len: int, kv_len: int, row_begin: int, row_end: int
) -> tuple[int, int]:
    """The KV tiles that packed rows row_begin .. row_end - 1 need; (0, 0) for none."""
    offset = kv_len - q_len
    first, end = 0, kv_len
    if spec.left >= 0:
        first = max(0, offset + row_begin // spec.group_size - spec.left)
    if spec.right >= 0:
        end = min(kv_len, offset + (row_end - 1) // spec.group_size + spec.right + 1)
    if end <= first:
        return 0, 0
    return first // spec.kv_tile, -(-end // spec.kv_tile)
