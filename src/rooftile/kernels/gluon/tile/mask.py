"""Which keys a query sees: bottom-right aligned causality, windows, the end of a sequence.

    first, blocks = key_range(row0, 128, q_len, kv_len, left, right, 128, True, True)
    low, high = whole_range(row0, offset, kv_len, left, right, 128, 128, True, True)
    for n in range(first, first + blocks):
        if (n < low) | (n >= high):
            seen = visible(rows, n * 128 + columns, offset, kv_len, left, right, True, True)
            s = gl.where(seen, s, float("-inf"))

Query i stands at position i + offset, offset = kv_len - q_len, and sees key j iff
position - left <= j <= position + right. `has_left` and `has_right` are known at compile time and
leave out the side that is unbounded; causal is right = 0.
"""
# mypy: disable-error-code="no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def key_range(
    row0,
    num_rows,
    q_len,
    kv_len,
    left,
    right,
    block: gl.constexpr,
    has_left: gl.constexpr,
    has_right: gl.constexpr,
):
    """First block of keys that rows row0 .. row0 + num_rows - 1 see, and how many (at least 1)."""
    offset = kv_len - q_len
    low = 0
    high = kv_len
    if has_right:
        last = gl.minimum(row0 + num_rows, q_len) - 1
        high = gl.maximum(gl.minimum(kv_len, last + offset + right + 1), 0)
    if has_left:
        low = gl.maximum(row0 + offset - left, 0)
    first = low // block
    return first, gl.maximum(gl.cdiv(high, block) - first, 1)


@gluon.jit
def visible(
    rows, columns, offset, kv_len, left, right, has_left: gl.constexpr, has_right: gl.constexpr
):
    """[rows, columns] bool: which keys each query sees."""
    # One comparison an element: the end of the sequence is folded into the rows' own bounds.
    position = rows + offset
    column = gl.expand_dims(columns, 0)
    if has_right:
        seen = column <= gl.expand_dims(gl.minimum(position + right, kv_len - 1), 1)
    else:
        seen = column <= gl.expand_dims(position * 0 + (kv_len - 1), 1)
    if has_left:
        seen = seen & (column >= gl.expand_dims(position - left, 1))
    return seen


@gluon.jit
def whole_range(
    row0,
    offset,
    kv_len,
    left,
    right,
    num_rows: gl.constexpr,
    block: gl.constexpr,
    has_left: gl.constexpr,
    has_right: gl.constexpr,
):
    """Blocks low .. high - 1 are seen whole by each of the rows; the others need a mask."""
    end = kv_len
    low = 0
    if has_right:
        end = gl.minimum(end, row0 + offset + right + 1)
    if has_left:
        low = gl.cdiv(gl.maximum(row0 + num_rows - 1 + offset - left, 0), block)
    return low, gl.maximum(end, 0) // block
