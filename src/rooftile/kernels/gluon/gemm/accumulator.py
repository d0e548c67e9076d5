"""A warpgroup's sums of a tile: one accumulator, or pieces of eight columns where they are no power of two.

    acc = no_sums(R, C, bits)                                    # C = 152: nineteen times [64, 8]
    acc = add_step(problem, ring, acc, fill, group, R, C)        # in flight
    acc = settle(acc, 1, R, C)                                   # but for the last step's products
    x = columns_of_sums(acc, 88, 64)                             # [64, 64]

wgmma multiplies any multiple of eight columns at a time, but Triton's tensors are powers of two. Of the
registers of an accumulator those of eight columns follow each other, so that pieces are one, side by
side: the instructions are assembly, and putting pieces together moves nothing. Where there are more
than 64 rows, the columns of the next 64 follow those of the first.
"""
# mypy: disable-error-code="no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from rooftile.kernels.gluon.tile.mma import accumulator_layout, multiply, wait
from rooftile.planning.tile_width import is_odd

_COLUMNS, _THREAD_REGISTERS, _SLABS = 8, 4, 4  # of a piece; of an operand's row, of 32 bytes
PIECE = gl.constexpr(_COLUMNS)
_ROWS = gl.constexpr(64)  # of an instruction
_REGISTERS = gl.constexpr(_THREAD_REGISTERS)
_ROW_BYTES = gl.constexpr(32 * _SLABS)
_BLOCK_UNITS = 64 * 32 * _SLABS // 16  # of 64 rows, as descriptors count


# Whether an accumulator has as many columns as no tensor of Triton's.
is_odd_width = gluon.constexpr_function(is_odd)


@gluon.constexpr_function
def _registers(columns):
    """Of a thread, of an accumulator."""
    return columns // _COLUMNS * _THREAD_REGISTERS


@gluon.constexpr_function
def _tied(columns, inputs):
    """Constraints of an instruction that takes `inputs` registers and changes an accumulator."""
    registers = _registers(columns)
    return ",".join(
        ["=f"] * registers + ["r"] * inputs + [str(number) for number in range(registers)]
    )


@gluon.constexpr_function
def _sums_types(columns):
    return (gl.float32,) * (columns // _COLUMNS)


@gluon.constexpr_function
def _multiply_asm(blocks, columns, dtype, add):
    """One step: rows of the left operand from $left on, 64 times `blocks`, times columns of the right one
    from $right on.

    Both are tiles of 128 bytes a row, swizzled; a matrix descriptor holds their address in units of 16
    bytes, from one eight rows to the next 64 units, and the kind of swizzle.
    """
    registers = _registers(columns)  # of a block
    left = blocks * registers
    right = left + _THREAD_REGISTERS
    kind = "bf16" if dtype == gl.bfloat16 else "f16"
    product = f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind}"
    lines = ["{ .reg .b64 left, right; .reg .b32 at_left, at_right; .reg .pred add;"]
    for name, place in (("left", left), ("right", right)):
        lines += [f"shr.u32 at_{name}, ${place}, 4; and.b32 at_{name}, at_{name}, 0x3fff;"]
    lines += [f"setp.ne.b32 add, {int(add)}, 0;", "wgmma.fence.sync.aligned;"]
    for slab in range(_SLABS):
        if slab:
            lines += ["add.u32 at_left, at_left, 2; add.u32 at_right, at_right, 2;"]
            lines += ["setp.ne.b32 add, 1, 0;"]
        lines += ["mov.b64 left, {at_left, 0x40000040}; mov.b64 right, {at_right, 0x40000040};"]
        for block in range(blocks):
            numbers = range(block * registers, (block + 1) * registers)
            sums = ", ".join(f"${number}" for number in numbers)
            if block:
                lines += [f"add.s64 left, left, {_BLOCK_UNITS};"]
            lines += [f"{product} {{{sums}}}, left, right, add, 1, 1, 0, 0;"]
    return " ".join([*lines, "wgmma.commit_group.sync.aligned; }"])


@gluon.jit
def _multiply_pieces(
    left, right, acc, dtype: gl.constexpr, R: gl.constexpr, C: gl.constexpr, add: gl.constexpr
):
    """Starts acc (plus, where `add`) the products of a step's operands at these addresses."""
    layout: gl.constexpr = accumulator_layout(PIECE)
    places = (
        gl.full([_ROWS, PIECE], left, gl.int32, layout),
        gl.full([_ROWS, PIECE], right, gl.int32, layout),
    )
    columns: gl.constexpr = R // _ROWS * C  # of all blocks, side by side
    return gl.inline_asm_elementwise(
        _multiply_asm(R // _ROWS, C, dtype, add), _tied(columns, 2 * _REGISTERS), places + acc,
        dtype=_sums_types(columns), is_pure=False, pack=_REGISTERS,
    )  # fmt: skip


@gluon.constexpr_function
def _wait_asm(steps):
    return f"wgmma.wait_group.sync.aligned {steps};"


@gluon.jit
def columns_of_sums(acc, first: gl.constexpr, columns: gl.constexpr):
    """Columns first .. first + columns - 1 of pieces, both multiples of eight, `columns` a power of two."""
    if columns == PIECE:
        return acc[first // PIECE]
    else:
        half: gl.constexpr = columns // 2
        left = columns_of_sums(acc, first, half)
        right = columns_of_sums(acc, first + half, half)
        both = gl.join(left, right).permute(0, 2, 1).reshape([_ROWS, columns])
        return gl.convert_layout(both, accumulator_layout(columns), assert_trivial=True)


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
def no_pieces(columns: gl.constexpr):
    pieces = ()
    for _ in gl.static_range(columns // PIECE):
        piece = gl.zeros([_ROWS, PIECE], gl.float32, accumulator_layout(PIECE))
        pieces = pieces + (piece,)  # type: ignore  # noqa: RUF005
    return pieces


@gluon.jit
def add_pieces(ring, acc, at, C: gl.constexpr):
    """Starts pieces of [64, C] plus the products of one step, which has arrived."""
    places = (ring.place_of_a(at), ring.place_of_b(at))
    return _multiply_pieces(places[0], places[1], acc, ring.a_tiles.dtype, _ROWS, C, True)


@gluon.jit
def settle_pieces(acc, steps: gl.constexpr, columns: gl.constexpr):
    """`settle`, of pieces."""
    return gl.inline_asm_elementwise(
        _wait_asm(steps), _tied(columns, 0), acc, dtype=_sums_types(columns), is_pure=False,
        pack=_REGISTERS,
    )  # fmt: skip


@gluon.jit
def no_sums(R: gl.constexpr, C: gl.constexpr, bits: gl.constexpr):
    if is_odd_width(C):
        return no_pieces(R // _ROWS * C)
    else:
        return gl.zeros([R, C], gl.float32, accumulator_layout(C, bits))


@gluon.jit
def add_step(
    problem, ring, acc, at, group: gl.constexpr, R: gl.constexpr, C: gl.constexpr,
    use_acc: gl.constexpr = True,
):  # fmt: skip
    """Starts acc plus the products of one step, which has arrived."""
    if is_odd_width(C):
        left = ring.place_of_a(at)
        right = ring.place_of_b(at)
        if problem.split_rows:
            left += group * R * _ROW_BYTES
        else:
            right += group * C * _ROW_BYTES
        return _multiply_pieces(left, right, acc, ring.a_tiles.dtype, R, C, use_acc)
    else:
        left = left_of(problem, ring, at, group, R)
        return multiply(left, right_of(problem, ring, at, group, C), acc, use_acc)


@gluon.jit
def settle(acc, steps: gl.constexpr, R: gl.constexpr, C: gl.constexpr):
    """Waits for all products but those of the last `steps` steps."""
    if is_odd_width(C):
        return settle_pieces(acc, steps, R // _ROWS * C)
    else:
        return wait(steps, deps=[acc])
