"""Where packed rows go: to the output, or as a part to the partial buffers."""
# mypy: disable-error-code="no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from rooftile.kernels.gluon.tile.mma import columns_of, rows_of

_CLEARED = gl.constexpr(512)  # values of padding that a CTA clears at once


@gluon.constexpr_function
def loading_layout(columns):
    """16 bytes a thread, whole rows a warp."""
    lanes = min(columns // 8, 32)
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])


@gluon.jit
def store_lse(work, lse, rows, end_row, token, kv_head):
    """The lse [rows] of a whole strip, if somebody reads it; returns where in [tokens, heads] each packed row is."""
    heads = work.heads_of_group()
    place = (token + rows // heads).to(gl.int64) * work.num_heads
    place = place + kv_head * heads + rows % heads
    if work.with_lse > 0:
        gl.store(work.lse + place, lse, mask=rows < end_row)
    return place


@gluon.jit
def store_rows(
    work,
    o,
    lse,
    first_row,
    rows,
    end_row,
    slot,
    token,
    kv_head,
    O: gl.constexpr,  # noqa: E741
):
    """The rows of a whole strip to the output, those of a part to the partial buffers.

    o [rows, v_dim] float32 in layout O and lse [rows], normalised; rows: the packed rows, as lse
    lies.
    """
    v_dim: gl.constexpr = o.shape[1]
    width = work.v_width_of_8 * 8
    column = gl.expand_dims(gl.arange(0, v_dim, columns_of(O)), 0)
    at_row = gl.convert_layout(rows, rows_of(O))
    there = gl.expand_dims(at_row < end_row, 1) & (column < width)
    if slot < 0:
        place = store_lse(work, lse, rows, end_row, token, kv_head)
        at = work.out + gl.expand_dims(gl.convert_layout(place, rows_of(O)), 1) * width + column
        gl.store(gl.multiple_of(at, [1, 16]), o.to(work.out.dtype.element_ty), mask=there)
    else:
        gl.store(work.partial_lse + slot + (rows - first_row), lse, mask=rows < end_row)
        part = (slot + (at_row - first_row)).to(gl.int64)
        at_part = work.partial_out + gl.expand_dims(part, 1) * width + column
        gl.store(gl.multiple_of(at_part, [1, 16]), o, mask=there)


@gluon.jit
def clear_padding(work):
    """Output 0 and lse -inf for the tokens after the last request."""
    L: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    lane = gl.arange(0, _CLEARED, L)
    first = gl.load(work.end_of_queries)
    rows = (work.tokens - first) * work.num_heads
    begin = gl.cast(first, gl.int64) * work.num_heads
    zero = gl.full([_CLEARED], 0.0, gl.float32, L)
    step = gl.num_programs(0) * _CLEARED
    for i in range(gl.program_id(0) * _CLEARED, rows * work.with_lse, step):
        gl.store(work.lse + begin + i + lane, zero - float("inf"), mask=i + lane < rows)
    for i in range(gl.program_id(0) * _CLEARED, rows * work.v_width_of_8 * 8, step):
        at = work.out + begin * (work.v_width_of_8 * 8) + i + lane
        gl.store(
            at, zero.to(work.out.dtype.element_ty), mask=i + lane < rows * work.v_width_of_8 * 8
        )
