"""Joins the parts that a plan cut strips into: a row's outputs weighted by their lse, in order."""
# mypy: disable-error-code="no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from rooftile.kernels.gluon.tile.softmax import LN_2, LOG2_E, NO_MAXIMUM

# Words of a merge of the plan (planning/split_kv.py: Merge).
_WORDS = gl.constexpr(8)
_PARTS_AT_ONCE = gl.constexpr(16)
_WARPS = gl.constexpr(4)


@gluon.constexpr_function
def _parts_layout(columns):
    lanes = min(columns // 4, 32)
    return gl.BlockedLayout([1, 4], [32 // lanes, lanes], [4, 1], [1, 0])


@gluon.jit(
    do_not_specialize=[
        "out", "lse", "partial_out", "partial_lse", "sink", "plan",
        "merges_at", "programs_a_merge", "group_size", "num_heads", "width_of_8",
    ]
)  # fmt: skip
def merge_kernel(
    out,  # pointer, [tokens, heads, v_dim]
    lse,  # pointer, [tokens, heads] float32
    partial_out,  # pointer, [partial_rows, v_dim] float32
    partial_lse,  # pointer, [partial_rows] float32
    sink,  # pointer, [heads] float32
    plan,  # pointer to int32, planning/split_kv.py
    merges_at,
    programs_a_merge,
    group_size,
    num_heads,
    width_of_8,  # v_dim / 8
    v_dim: gl.constexpr,  # of the tile, at least the tensors'
    has_sink: gl.constexpr,
):
    """Program i takes every programs_a_merge-th row of merge i // programs_a_merge."""
    L: gl.constexpr = _parts_layout(v_dim)
    dtype: gl.constexpr = out.dtype.element_ty
    merge = gl.program_id(0) // programs_a_merge
    if merge < gl.load(plan):
        width = width_of_8 * 8
        words = plan + merges_at + merge * _WORDS
        kv_head = gl.load(words + 1)
        row_begin = gl.load(words + 2)
        row_end = gl.load(words + 3)
        partial_row = gl.load(words + 4)
        parts = gl.load(words + 5)
        row_stride = gl.load(words + 6)
        q_begin = gl.load(words + 7)
        part = gl.arange(0, _PARTS_AT_ONCE, gl.SliceLayout(1, L))
        column = gl.arange(0, v_dim, gl.SliceLayout(0, L))
        inside = column < width
        first = row_begin + gl.program_id(0) % programs_a_merge
        for row in range(first, row_end, programs_a_merge):
            head = kv_head * group_size + row % group_size
            maximum = NO_MAXIMUM
            total = 0.0
            if has_sink:
                at_sink = gl.load(sink + head) * LOG2_E
                maximum = gl.maximum(at_sink, NO_MAXIMUM)
                total = gl.where(at_sink > NO_MAXIMUM, 1.0, 0.0)
            acc = gl.full([v_dim], 0.0, gl.float32, gl.SliceLayout(0, L))
            for i in range(0, parts, _PARTS_AT_ONCE):
                there = i + part < parts
                at = (partial_row + (row - row_begin) + (i + part) * row_stride).to(gl.int64)
                logs = gl.load(partial_lse + at, mask=there, other=float("-inf")) * LOG2_E
                places = partial_out + gl.expand_dims(at, 1) * width + gl.expand_dims(column, 0)
                o = gl.load(
                    gl.multiple_of(places, [1, 16]),
                    mask=gl.expand_dims(there, 1) & gl.expand_dims(inside, 0),
                    other=0.0,
                )
                highest = gl.maximum(maximum, gl.max(logs, 0))
                weights = gl.exp2(logs - highest)
                shrink = gl.exp2(maximum - highest)
                total = total * shrink + gl.sum(weights, 0)
                acc = acc * shrink + gl.sum(o * gl.expand_dims(weights, 1), 0)
                maximum = highest
            token = gl.cast(q_begin + row // group_size, gl.int64)
            place = token * num_heads + head
            result = acc * (1.0 / gl.where(total > 0.0, total, 1.0))
            gl.store(out + place * width + column, result.to(dtype), mask=inside)
            seen = (maximum + gl.log2(total)) * LN_2
            gl.store(lse + place, gl.where(total > 0.0, seen, float("-inf")))
