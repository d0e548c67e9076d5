"""A warpgroup's sums of a tile: one accumulator, or two side by side where its columns are no power of two.

    acc = no_sums(R, C, bits)                                    # C = 192: [R, 128] and [R, 64]
    acc = add_step(problem, ring, acc, fill, group, R, C)        # in flight
    acc = settle(acc, 1, C)                                      # but for the last step's products

Triton's tiles are powers of two. Some products fill the machine with tiles of 192 columns, and not with
those. The second accumulator reads the left operand again, which takes no longer than multiplying it by 64
columns, but 1.5 times as long as by 32: tiles of 96 and 160 columns gained nothing.
"""
# mypy: disable-error-code="no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from rooftile.kernels.gluon.tile.mma import accumulator_layout, multiply, wait


@gluon.constexpr_function
def first_columns(columns):
    """Of the first accumulator: the largest power of two."""
    return 1 << (columns.bit_length() - 1)


@gluon.constexpr_function
def is_odd_width(columns):
    """Whether there are two accumulators."""
    return columns & (columns - 1) != 0


@gluon.jit
def left_of(problem, ring, at, group: gl.constexpr, R: gl.constexpr):
    """This warpgroup's rows of the left operand, [R, block_k]."""
    tile = ring.a(at)
    if problem.a_by_rows:
        return tile.slice(group * R, R, 0) if problem.split_rows else tile
    else:
        tile = tile.slice(group * R, R, 1) if problem.split_rows else tile
        return tile.permute((1, 0))


@gluon.jit
def right_of(problem, ring, at, group: gl.constexpr, C: gl.constexpr):
    """This warpgroup's columns of the right operand, [block_k, C]."""
    if problem.b_by_rows:
        box: gl.constexpr = 0 if problem.split_rows else group
        return ring.b(at, box)
    else:
        tile = ring.whole_b(at)
        tile = tile if problem.split_rows else tile.slice(group * C, C, 0)
        return tile.permute((1, 0))


@gluon.jit
def no_sums(R: gl.constexpr, C: gl.constexpr, bits: gl.constexpr):
    first: gl.constexpr = first_columns(C)
    sums = gl.zeros([R, first], gl.float32, accumulator_layout(first, bits))
    if first < C:
        rest: gl.constexpr = C - first
        return sums, gl.zeros([R, rest], gl.float32, accumulator_layout(rest, bits))
    else:
        return sums


@gluon.jit
def add_step(
    problem, ring, acc, at, group: gl.constexpr, R: gl.constexpr, C: gl.constexpr, use_acc=True
):
    """Starts acc plus the products of one step, which has arrived."""
    first: gl.constexpr = first_columns(C)
    left = left_of(problem, ring, at, group, R)
    if first < C:
        rest: gl.constexpr = C - first
        return (
            multiply(left, ring.columns_of_b(at, 0, first).permute((1, 0)), acc[0], use_acc),
            multiply(left, ring.columns_of_b(at, first, rest).permute((1, 0)), acc[1], use_acc),
        )
    else:
        return multiply(left, right_of(problem, ring, at, group, C), acc, use_acc)


@gluon.jit
def settle(acc, steps: gl.constexpr, C: gl.constexpr):
    """Waits for all products but those of the last `steps` steps."""
    if first_columns(C) < C:
        first, rest = wait(2 * steps, deps=[acc[0], acc[1]])
        return first, rest
    else:
        return wait(steps, deps=[acc])
