"""From products of queries and keys to scores in log2 units: soft cap, ALiBi, what is hidden."""
# mypy: disable-error-code="no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from rooftile.kernels.gluon.tile import mask
from rooftile.kernels.gluon.tile.mma import GROUP_ROWS
from rooftile.kernels.gluon.tile.softmax import (
    LN_2,
    LOG2_E,
    soft_cap,
    start_softmax,
    start_softmax_at_sink,
)


@gluon.jit
def first_softmax(problem, head, kv_len, layout: gl.constexpr, at_sink=True):
    """The softmax of 64 rows of a head before any key; at_sink: or after
    the head's sink, where heads have one."""
    if problem.has_sink:
        sink = gl.load(problem.sink + head)
        if kv_len < 0:  # padding after the last sequence
            sink = float("-inf")
        if not at_sink:
            sink = float("-inf")
        return start_softmax_at_sink(sink, GROUP_ROWS, layout)
    else:
        return start_softmax(GROUP_ROWS, layout)


@gluon.jit
def adjusted(problem, s, slope, positions, columns):
    """Scores after soft cap and ALiBi, and the factor that is left to bring them to log2 units.

    slope: of the head's ALiBi in log2 units, None: it has none; positions: of the queries.
    """
    factor = problem.factor
    if problem.has_softcap:
        s = soft_cap(s, problem.factor, problem.softcap)
        factor = 1.0  # soft_cap gives log2 units
    if slope is not None:
        s = _by_distance(s, factor, slope, positions, columns)
        factor = 1.0
    return s, factor


@gluon.jit
def modified(
    problem,
    s,  # [rows, block]
    factor,
    sequence,  # its number in the batch
    head,
    rows,  # [rows], queries
    columns,  # [block], keys
    q_len,
    kv_len,
):
    """Scores in log2 units after the caller's functions, which see valid indices only."""
    row = gl.expand_dims(gl.minimum(rows, q_len - 1), 1)
    column = gl.expand_dims(gl.minimum(columns, kv_len - 1), 0)
    s = s * factor
    if problem.mods.score is not None:
        new = problem.mods.score(
            s * LN_2, sequence, head, row, column, *problem.mods.score_captured
        )
        s = (row * 0 + column * 0).to(gl.float32) + new.to(gl.float32) * LOG2_E
    if problem.mods.mask is not None:
        seen = problem.mods.mask(sequence, head, row, column, *problem.mods.mask_captured)
        s = gl.where(seen, s, float("-inf"))
    return s


@gluon.jit
def _by_distance(s, factor, slope, positions, columns):
    """Scores in log2 units, lowered in proportion to the distance of query and key (ALiBi)."""
    distance = gl.expand_dims(positions.to(gl.float32), 1) - gl.expand_dims(
        columns.to(gl.float32), 0
    )
    return s * factor - slope * gl.maximum(distance, -distance)


@gluon.jit
def hide(problem, s, rows, key0, columns, offset, kv_len, in_one: gl.constexpr = False):
    """Scores with what a query does not see at -inf; key0: of the first column; in_one: see tile/mask.py."""
    return mask.hide(
        s,
        rows,
        key0,
        columns,
        offset,
        kv_len,
        problem.left,
        problem.right,
        problem.has_left,
        problem.has_right,
        in_one,
    )
