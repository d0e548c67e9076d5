"""Which keys a query sees: bottom-right aligned causality, windows, the end of a sequence.

    first, blocks = key_range(row0, 128, q_len, kv_len, left, right, 128, True, True)
    low, high = whole_range(row0, offset, kv_len, left, right, 128, 128, True, True)
    for n in range(first, first + blocks):
        if (n < low) | (n >= high):
            s = hide(s, rows, n * 128, columns, offset, kv_len, left, right, True, True, True)

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


@gluon.constexpr_function
def _hide_asm(count, has_left):
    """-inf for those of a thread's scores whose column is beyond the last of its row, or before the first.

    Of each eight columns a thread has two, of two rows; in which order: see `accumulator_layout`.
    """
    # Operands: results, scores, columns, a last column for each and a first one.
    columns = 2 * count
    lines = [".reg .pred out;", ".reg .s32 last<2>, first<2>;"]
    for half in range(2):
        lines.append(f"sub.s32 last{half}, ${columns + count + 2 * half}, ${columns};")
        if has_left:
            lines.append(f"sub.s32 first{half}, ${columns + 2 * count + 2 * half}, ${columns};")
    for i in range(count):
        half, column = i // 2 % 2, i // 4 * 8 + i % 2
        lines.append(f"setp.lt.s32 out, last{half}, {column};")
        if has_left:
            lines.append(f"setp.gt.or.s32 out, first{half}, {column}, out;")
        lines.append(f"@out mov.f32 ${i}, 0fFF800000;")
    return "{ " + " ".join(lines) + " }"


@gluon.constexpr_function
def _hide_constraints(count, has_left):
    tied = [str(i) for i in range(count)]
    return ",".join(["=f"] * count + tied + ["r"] * (count * (3 if has_left else 2)))


@gluon.jit
def hide(
    s,  # [64, columns] float32, an accumulator of one warpgroup
    rows,  # [64], queries
    key0,  # of the first column
    columns,  # [columns], 0, 1, ...
    offset,
    kv_len,
    left,
    right,
    has_left: gl.constexpr,
    has_right: gl.constexpr,
    in_one: gl.constexpr,
):
    """Scores with what a query does not see at -inf.

    in_one: as one piece of assembly for all of a thread's scores. Written as comparisons of tensors, a mask is a
    tenth of what a kernel takes to compile, most of it in LLVM's search for vectors; but dense causal
    calls are 1% to 7% faster so (docs/performance.md). With a window the piece is faster, too; and with three
    groups ptxas keeps the columns of comparisons in local memory across the loop over keys.
    """
    if has_left or in_one:
        count: gl.constexpr = s.shape[1] // 2  # of a thread
        position = rows + offset
        if has_right:
            last = gl.minimum(position + right, kv_len - 1) - key0
        else:
            last = position * 0 + (kv_len - 1 - key0)
        last = gl.expand_dims(last, 1)
        column = gl.expand_dims(columns, 0)
        first = gl.expand_dims(position - left - key0, 1) if has_left else None
        return gl.inline_asm_elementwise(
            _hide_asm(count, has_left),
            _hide_constraints(count, has_left),
            (s, column, last, first) if has_left else (s, column, last),
            dtype=gl.float32,
            is_pure=True,
            pack=count,
        )
    else:
        seen = visible(rows, key0 + columns, offset, kv_len, left, right, has_left, has_right)
        return gl.where(seen, s, float("-inf"))


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
