"""Joining the parts that a plan cut a strip into: the CTA whose part arrives last does it.

A part is written, then counted in the strip's merge (an atomic of release and acquire order, after
a barrier of its warpgroup). Whoever counts the last one sees all of them, and sums them up first
keys first, so the result does not depend on who it is. It sets the count back to 0: calls that follow
one another may share a plan.
"""
# mypy: disable-error-code="no-untyped-def,assignment"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from rooftile.kernels.gluon.paged.rows import store_rows
from rooftile.kernels.gluon.paged.work import MERGE_WORDS
from rooftile.kernels.gluon.tile.said import add_once, any_of
from rooftile.kernels.gluon.tile.softmax import LN_2, LOG2_E, NO_MAXIMUM

# A count of parts for each warpgroup in one word.
_COUNT_BITS = gl.constexpr(15)
_FEW_ROWS = gl.constexpr(32)  # of a warpgroup: more in flight of each, fewer at a time


@gluon.jit
def arrive_last(work, merge, parts, group):
    """Counts this warpgroup's part of merge `merge`; whether it was the last of `parts`."""
    counter = work.plan + work.merges_at + merge * MERGE_WORDS
    first, before = add_once(counter, 1 << (group * _COUNT_BITS))
    counted = (before >> (group * _COUNT_BITS)) & ((1 << _COUNT_BITS) - 1)
    last = any_of(work.said.index(group), first & (counted == parts - 1))
    if last:
        gl.atomic_add(counter, -(parts << (group * _COUNT_BITS)), sem="relaxed", scope="gpu")
    return last


@gluon.constexpr_function
def row_layout(columns):
    """A packed row over the lanes of a warp, four values of 128 columns a thread."""
    lanes = min(columns // 4, 32)
    return gl.BlockedLayout([1, 4], [32 // lanes, lanes], [4, 1], [1, 0])


@gluon.jit
def join_parts(
    work,
    first,  # row of the partial buffers: of the strip's first part and first_row
    parts,
    first_row,  # packed rows of this warpgroup
    end_row,
    token,
    kv_head,
    num_rows: gl.constexpr,
    v_dim: gl.constexpr,
):
    """Stores the output and lse of num_rows packed rows from all parts and the sink.

    A thread has all parts of its four columns of a row, so that none waits for another, and loads
    64 values before it uses the first.
    """
    L: gl.constexpr = row_layout(v_dim)
    R: gl.constexpr = gl.SliceLayout(1, L)
    at_a_time: gl.constexpr = 4 if num_rows <= _FEW_ROWS else 8
    at_once: gl.constexpr = max(
        (64 if num_rows <= _FEW_ROWS else 32) // at_a_time * 128 // v_dim, 1
    )
    width = work.v_width_of_8 * 8
    column = gl.expand_dims(gl.arange(0, v_dim, gl.SliceLayout(0, L)), 0)
    outs = work.partial_out + gl.cast(first, gl.int64) * width
    lses = work.partial_lse + first
    for row0 in range(first_row, end_row, at_a_time):
        rows = row0 + gl.arange(0, at_a_time, R)
        mine = rows < end_row
        there = gl.expand_dims(mine, 1) & (column < width)
        maximum = gl.full([at_a_time], NO_MAXIMUM, gl.float32, R)
        total = gl.full([at_a_time], 0.0, gl.float32, R)
        if work.has_sink:
            heads = work.heads_of_group()
            head = kv_head * heads + rows % heads
            sink = gl.load(work.sink + head, mask=mine, other=float("-inf")) * LOG2_E
            maximum = gl.maximum(sink, NO_MAXIMUM)
            total = gl.where(sink > NO_MAXIMUM, 1.0, 0.0)
        acc = gl.full([at_a_time, v_dim], 0.0, gl.float32, L)
        for i in range(0, parts, at_once):
            logs = ()
            values = ()
            for j in gl.static_range(at_once):  # all loads before the first use
                at = (i + j) * work.row_stride + (rows - first_row)
                log = gl.load(lses + at, mask=mine & (i + j < parts), other=float("-inf"))
                place = outs + gl.expand_dims(at, 1) * width + column
                mask = there & (i + j < parts)
                value = gl.load(gl.multiple_of(place, [1, 16]), mask=mask, other=0.0)
                logs = logs + (log * LOG2_E,)  # noqa: RUF005
                values = values + (value,)  # noqa: RUF005
            highest = maximum
            for j in gl.static_range(at_once):
                highest = gl.maximum(highest, logs[j])
            shrink = gl.exp2(maximum - highest)
            total = total * shrink
            acc = acc * gl.expand_dims(shrink, 1)
            for j in gl.static_range(at_once):
                weight = gl.exp2(logs[j] - highest)
                total = total + weight
                acc = acc + values[j] * gl.expand_dims(weight, 1)
            maximum = highest
        visible = total != 0.0
        acc = acc * gl.expand_dims(1.0 / gl.where(visible, total, 1.0), 1)
        lse = gl.where(visible, (maximum + gl.log2(total)) * LN_2, float("-inf"))
        store_rows(work, acc, lse, first_row, rows, end_row, -1, token, kv_head, L)
