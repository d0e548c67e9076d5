"""Tiles of which only some columns are used: one product after the other over powers of two.

    used: gl.constexpr = 192                                  # of tiles of 256 columns
    s = multiply_used(q, k, s, used)                          # q and k: zeros after column 192
    o = zero_output(256, used)                                # [64, 128] and [64, 64] in registers
    o = add_output(o, p, v, used)                             # in flight: o += p @ v[:, :192]
    o, p = settle_output(o, [p], used)                        # waits for it
    o = scale_output(o, alpha, used, lazy=False)
    store_output(tile, o, dtype, used)

Tiles and accumulators are powers of two; head dims 96 and 192 are three quarters of one. Two
accumulators side by side (a tuple), and products over the first 64 + 32 or 128 + 64 columns, save the fourth
quarter of the matrix work. `used` may be all columns, half of them, or three quarters.
"""
# mypy: disable-error-code="no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from rooftile.kernels.gluon.tile.mma import (
    GROUP_ROWS,
    accumulator_layout,
    left_operand_layout,
    multiply,
    rows_of,
    wait,
)
from rooftile.kernels.gluon.tile.softmax import rescale


@gluon.jit
def multiply_used(a, b, acc, used: gl.constexpr):
    """Starts acc = a[:, :used] @ b[:, :used]^T; a [64, K] and b [N, K or wider] in shared memory."""
    half: gl.constexpr = a.shape[1] // 2
    if used == a.shape[1]:
        whole = b if b.shape[1] == used else b.slice(0, used, 1)
        return multiply(a, whole.permute((1, 0)), acc, use_acc=False)
    else:
        acc = multiply(a.slice(0, half, 1), b.slice(0, half, 1).permute((1, 0)), acc, use_acc=False)
        if used > half:
            rest: gl.constexpr = used - half
            acc = multiply(a.slice(half, rest, 1), b.slice(half, rest, 1).permute((1, 0)), acc)
        return acc


@gluon.constexpr_function
def left_columns(tile, used):
    """Of the first accumulator, which is the only one unless three quarters are used."""
    return tile if used == tile else tile // 2


@gluon.constexpr_function
def output_layout(tile, used):
    return accumulator_layout(left_columns(tile, used))


@gluon.jit
def zero_output(tile: gl.constexpr, used: gl.constexpr):
    """[64, used] zeros; tile: columns of V's tiles."""
    columns: gl.constexpr = left_columns(tile, used)
    left = gl.zeros([GROUP_ROWS, columns], gl.float32, accumulator_layout(columns))
    if used > columns:
        rest: gl.constexpr = used - columns
        right = gl.zeros([GROUP_ROWS, rest], gl.float32, accumulator_layout(rest))
        return left, right
    else:
        return left


@gluon.jit
def add_output(o, weights, v, used: gl.constexpr):
    """Starts o += weights @ v[:, :used]; weights [64, keys] in registers, v [keys, tile] shared."""
    columns: gl.constexpr = left_columns(v.shape[1], used)
    if used == v.shape[1]:
        return multiply(weights, v, o)
    elif used > columns:
        rest: gl.constexpr = used - columns
        left = multiply(weights, v.slice(0, columns, 1), o[0])
        layout: gl.constexpr = left_operand_layout(accumulator_layout(rest))
        same = gl.convert_layout(weights, layout)
        return left, multiply(same, v.slice(columns, rest, 1), o[1])
    else:
        return multiply(weights, v.slice(0, columns, 1), o)


@gluon.jit
def settle_output(o, weights, p, alpha, total, tile: gl.constexpr, used: gl.constexpr):
    """Waits for all products; what must not move above the wait passes through it."""
    if used > left_columns(tile, used):
        left, right, weights, p, alpha, total = wait(0, deps=[o[0], o[1], weights, p, alpha, total])
        return (left, right), weights, p, alpha, total
    else:
        o, weights, p, alpha, total = wait(0, deps=[o, weights, p, alpha, total])
        return o, weights, p, alpha, total


@gluon.jit
def finish_output(o, weights, tile: gl.constexpr, used: gl.constexpr):
    """Waits for all products."""
    if used > left_columns(tile, used):
        left, right, weights = wait(0, deps=[o[0], o[1], weights])
        return left, right
    else:
        o, weights = wait(0, deps=[o, weights])
        return o


@gluon.jit
def scale_output(o, alpha, tile: gl.constexpr, used: gl.constexpr, lazy: gl.constexpr):
    """o * alpha per row, see `rescale`."""
    columns: gl.constexpr = left_columns(tile, used)
    at_left: gl.constexpr = rows_of(accumulator_layout(columns))
    if used > columns:
        rest: gl.constexpr = used - columns
        at_right: gl.constexpr = rows_of(accumulator_layout(rest))
        left = rescale(o[0], gl.convert_layout(alpha, at_left), columns, lazy)
        return left, rescale(o[1], gl.convert_layout(alpha, at_right), rest, lazy)
    else:
        return rescale(o, gl.convert_layout(alpha, at_left), columns, lazy)


@gluon.jit
def store_output(target, o, dtype: gl.constexpr, used: gl.constexpr):
    """Into a shared tile [64, tile]; columns that are not used keep what they hold."""
    columns: gl.constexpr = left_columns(target.shape[1], used)
    if used == target.shape[1]:
        target.store(o.to(dtype))
    elif used > columns:
        rest: gl.constexpr = used - columns
        target.slice(0, columns, 1).store(o[0].to(dtype))
        target.slice(columns, rest, 1).store(o[1].to(dtype))
    else:
        target.slice(0, columns, 1).store(o.to(dtype))
