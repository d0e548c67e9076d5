"""Tiles cut along their keys, where there are too few of them to keep all CTAs busy to the end.

The host shares the blocks of keys out (planning/key_shares.py): a CTA's items are whole tiles or parts.
A part's normalised output and lse go to float32 memory; then the part is counted, and whoever counts
the last one of a tile joins them, first keys first, so that the result does not depend on who it is.
"""
# mypy: disable-error-code="no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from rooftile.kernels.gluon.tile.halves import left_columns, output_layout
from rooftile.kernels.gluon.tile.held import add_held, store_held
from rooftile.kernels.gluon.tile.mma import (
    GROUP_ROWS,
    accumulator_layout,
    rows_of,
)
from rooftile.kernels.gluon.tile.record import record
from rooftile.kernels.gluon.tile.said import add_once, any_of
from rooftile.kernels.gluon.tile.softmax import LN_2, LOG2_E, NO_MAXIMUM
from rooftile.planning import key_shares

# Words of an item; that of CTA c which comes first lies at place c.
TILE = gl.constexpr(0)
FIRST_BLOCK = gl.constexpr(1)
NUM_BLOCKS = gl.constexpr(2)
PART = gl.constexpr(3)  # which of all parts, -1: the item is a whole tile
FIRST_PART = gl.constexpr(4)  # of the tile, first keys first
PARTS = gl.constexpr(5)
CUT_TILE = gl.constexpr(6)  # the tile's number among those in parts
FOLLOWING = gl.constexpr(7)  # place of the CTA's next item, the number of places: there is none
WORDS = gl.constexpr(key_shares.WORDS)


@record
class Shares:
    """Who attends to what; `split` False: CTAs take whole tiles, and nothing here but `said` is used."""

    items: gl.tensor  # pointer, [places, WORDS] int32
    parts: gl.tensor  # pointer, [parts, tile rows * (1 + columns)] float32: lse, then the output
    arrived: gl.tensor  # pointer, [cut tiles * groups] int32: 0 at launch, and again at the end
    said: gl.shared_memory_descriptor  # [groups, 4] int32, see tile/said.py
    as_planned: gl.tensor  # False: lengths are others, CTAs take whole tiles
    groups: gl.constexpr
    columns: gl.constexpr  # of V's tiles
    split: gl.constexpr

    @gluon.jit
    def word(self, place, i: gl.constexpr, other=-1):
        """Word i of an item; `other` where tiles are whole."""
        return gl.load(self.items + place * WORDS + i, mask=self.as_planned, other=other)

    @gluon.jit
    def has_first_keys(self, place):
        """Whether an item is a tile or the first of its parts."""
        return self.word(place, PART) == self.word(place, FIRST_PART)

    @gluon.jit
    def rows_of_part(self, part, group):
        """Pointers to the lse of a warpgroup's first row, and to its output, see tile/held.py."""
        rows: gl.constexpr = GROUP_ROWS * self.groups
        begin = self.parts + gl.cast(part, gl.int64) * (rows * (1 + self.columns))
        values = begin + (rows + group * GROUP_ROWS * self.columns)
        return begin + group * GROUP_ROWS, values

    @gluon.jit
    def is_last(self, cut_tile, parts, group):
        """Counts a part of this warpgroup, which has been stored; whether it was the last."""
        counter = self.arrived + cut_tile * self.groups + group
        first, before = add_once(counter, 1)
        last = any_of(self.said.index(group), first & (before == parts - 1))
        if last:
            gl.store(counter, 0)
        return last


@gluon.jit
def is_one_sequence(cu_seqlens_q, cu_seqlens_k, tokens, keys):
    """Whether the first sequence of a ragged batch has all tokens and keys."""
    q = (gl.load(cu_seqlens_q) == 0) & (gl.load(cu_seqlens_q + 1) == tokens)
    return q & (gl.load(cu_seqlens_k) == 0) & (gl.load(cu_seqlens_k + 1) == keys)


@gluon.jit
def _joined(
    shares,
    first,
    parts,
    group,
    first_column: gl.constexpr,
    columns: gl.constexpr,
):
    """Columns of the output, normalised, and the lse of a warpgroup's rows, from all parts."""
    layout: gl.constexpr = accumulator_layout(columns)
    rows = gl.arange(0, GROUP_ROWS, rows_of(layout))
    maximum = gl.full([GROUP_ROWS], NO_MAXIMUM, gl.float32, rows_of(layout))
    total = gl.full([GROUP_ROWS], 0.0, gl.float32, rows_of(layout))
    acc = gl.zeros([GROUP_ROWS, columns], gl.float32, layout)
    for i in range(parts):
        lse, values = shares.rows_of_part(first + i, group)
        log = gl.load(lse + rows) * LOG2_E
        highest = gl.maximum(maximum, log)
        shrink = gl.exp2(maximum - highest)
        weight = gl.exp2(log - highest)
        total = total * shrink + weight
        acc = add_held(acc, shrink, weight, values + first_column * GROUP_ROWS)
        maximum = highest
    visible = total != 0.0
    acc = acc * gl.expand_dims(1.0 / gl.where(visible, total, 1.0), 1)
    return acc, gl.where(visible, (maximum + gl.log2(total)) * LN_2, float("-inf"))


@gluon.jit
def finish_item(
    shares,
    place,
    o,  # [64, used] float32, normalised, see tile/halves.py
    lse,  # [64]
    group,
    used: gl.constexpr,
    of_scores: gl.constexpr,  # layout of lse
):
    """Whether this warpgroup's rows of a tile are complete, and then their output and lse."""
    left: gl.constexpr = left_columns(shares.columns, used)
    part = shares.word(place, PART)
    complete = True
    if part >= 0:
        parts = shares.word(place, PARTS)
        first = shares.word(place, FIRST_PART)
        cut_tile = shares.word(place, CUT_TILE)
        to_lse, values = shares.rows_of_part(part, group)
        of_lse: gl.constexpr = rows_of(output_layout(shares.columns, used))
        to_rows = to_lse + gl.arange(0, GROUP_ROWS, of_lse)
        gl.store(to_rows, gl.convert_layout(lse, of_lse))
        if used > left:
            store_held(values, o[0])
            store_held(values + left * GROUP_ROWS, o[1])
        else:
            store_held(values, o)
        complete = shares.is_last(cut_tile, parts, group)
        if complete:
            if used > left:
                at_left, log = _joined(shares, first, parts, group, 0, left)
                at_right, _log = _joined(shares, first, parts, group, left, used - left)
                o = at_left, at_right
            else:
                o, log = _joined(shares, first, parts, group, 0, left)
            lse = gl.convert_layout(log, of_scores)
    return complete, o, lse
