"""An accumulator in global memory, for another warpgroup, by eight columns of all rows at a time.

    store_held(pointer, acc)                        # [64, columns] float32, into 64 * columns words
    acc = add_held(acc, shrink, weight, pointer)    # acc * shrink + what was stored * weight

A thread has two columns of eight, of two rows, so a warp's copies are of 256 bytes, where rows of an
accumulator would take pieces of 32. Each is one piece of assembly: as tensors, whose addresses
are computed one by one, they took a quarter of what a kernel of parts takes to compile.
"""
# mypy: disable-error-code="no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from rooftile.kernels.gluon.tile.mma import GROUP_ROWS, accumulator_layout, rows_of

_ROW = 8 * 4  # bytes of eight columns


@gluon.constexpr_function
def _own_asm(row):
    """The address of a thread's first value, of operand `row`, where its row begins."""
    return (
        ".reg .b32 lane; .reg .b64 own; mov.u32 lane, %laneid; and.b32 lane, lane, 3; "
        f"mad.wide.u32 own, lane, 8, ${row};"
    )


@gluon.constexpr_function
def _offset(i):
    """Of a thread's value i from its first one, in bytes."""
    return i // 4 * 64 * _ROW + i // 2 % 2 * 8 * _ROW


@gluon.constexpr_function
def _store_asm(count):
    """Its results, a byte for each value because Triton wants some, are not written."""
    first, lines = count // 4, []
    for i in range(0, count, 2):
        pair = f"${first + i}, ${first + i + 1}"
        lines.append(f"st.global.v2.f32 [own+{_offset(i)}], {{{pair}}};")
    return f"{{ {_own_asm(first + count)} {' '.join(lines)} }}"


@gluon.constexpr_function
def _store_constraints(count):
    return ",".join(["=r"] * (count // 4) + ["f"] * count + ["l"] * count)


@gluon.constexpr_function
def _add_asm(count):
    lines = [".reg .f32 held<2>;"]
    for i in range(0, count, 2):
        lines.append(f"ld.global.v2.f32 {{held0, held1}}, [own+{_offset(i)}];")
        for j in range(2):
            shrink, weight = (f"${k * count + i + j}" for k in (2, 3))
            lines.append(f"mul.f32 held{j}, held{j}, {weight};")
            lines.append(f"fma.rn.f32 ${i + j}, ${i + j}, {shrink}, held{j};")
    return f"{{ {_own_asm(4 * count)} {' '.join(lines)} }}"


@gluon.constexpr_function
def _add_constraints(count):
    tied = [str(i) for i in range(count)]
    others = ["f"] * (2 * count) + ["l"] * count
    return ",".join(["=f"] * count + tied + others)


@gluon.jit
def store_held(
    pointer,  # float32, on a multiple of 8 bytes
    acc,  # [64, columns] float32, an accumulator of one warpgroup
):
    count: gl.constexpr = acc.shape[1] // 2  # of a thread
    row = gl.expand_dims(gl.arange(0, GROUP_ROWS, rows_of(accumulator_layout(acc.shape[1]))), 1)
    begin = gl.cast(pointer + row * 8, gl.int64)  # of each row
    gl.inline_asm_elementwise(
        _store_asm(count),
        _store_constraints(count),
        [acc, begin],
        dtype=gl.int8,
        is_pure=False,
        pack=count,
    )


@gluon.jit
def add_held(
    acc,  # [64, columns] float32, an accumulator of one warpgroup
    shrink,  # [64] float32
    weight,  # [64] float32
    pointer,  # as of `store_held`
):
    count: gl.constexpr = acc.shape[1] // 2  # of a thread
    row = gl.expand_dims(gl.arange(0, GROUP_ROWS, rows_of(accumulator_layout(acc.shape[1]))), 1)
    begin = gl.cast(pointer + row * 8, gl.int64)  # of each row
    return gl.inline_asm_elementwise(
        _add_asm(count),
        _add_constraints(count),
        [
            acc,
            gl.expand_dims(shrink, 1),
            gl.expand_dims(weight, 1),
            begin,
        ],
        dtype=gl.float32,
        is_pure=False,
        pack=count,
    )
