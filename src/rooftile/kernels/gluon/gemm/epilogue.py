"""What happens to a finished tile on its way to memory: scales, bias, activation, gate, residual."""
# mypy: disable-error-code="no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from rooftile.kernels.gluon.gemm.fixup import add_parts
from rooftile.kernels.gluon.tile.mma import accumulator_layout, columns_of, narrow, rows_of
from rooftile.kernels.triton_version import tma_store, tma_store_wait

ELEMENTS = gl.constexpr(64 * 128)  # of parts that a warpgroup reads at a time: 64 registers


@gluon.jit
def halves(x, R: gl.constexpr, C: gl.constexpr, bits: gl.constexpr):
    """Left and right half of x [R, C], each thread keeping what it has."""
    half: gl.constexpr = C // 2
    layout: gl.constexpr = accumulator_layout(half, bits)
    left, right = x.reshape([R, 2, half]).permute(0, 2, 1).split()
    left = gl.convert_layout(left, layout, assert_trivial=True)
    right = gl.convert_layout(right, layout, assert_trivial=True)
    return left, right


@gluon.jit
def _sigmoid(x):
    return 1.0 / (1.0 + gl.exp2(x * -1.4426950408889634))


@gluon.jit
def activate(x, activation: gl.constexpr):
    if activation == "silu":
        return x * _sigmoid(x)
    elif activation == "gelu":
        return 0.5 * x * (1.0 + gl.erf(x * 0.7071067811865476))
    elif activation == "gelu_tanh":
        # 0.5 x (1 + tanh y) is x sigmoid(2 y)
        return x * _sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        return x


@gluon.jit
def _before_activation(problem, x, rows, columns):
    """Scales and bias of a chunk, by its rows and by its columns in b."""
    inside = columns < problem.n
    if problem.has_scales:
        by_row = gl.load(
            problem.scale_a + rows * problem.scale_a_stride, mask=rows < problem.m, other=0.0
        )
        by_column = gl.load(
            problem.scale_b + columns * problem.scale_b_stride, mask=inside, other=0.0
        )
        x = x * gl.expand_dims(by_row, 1) * gl.expand_dims(by_column, 0)
    if problem.has_bias:
        if problem.transposed:
            bias = gl.load(problem.bias + rows, mask=rows < problem.m, other=0.0).to(gl.float32)
            x = x + gl.expand_dims(bias, 1)
        else:
            bias = gl.load(problem.bias + columns, mask=inside, other=0.0).to(gl.float32)
            x = x + gl.expand_dims(bias, 0)
    return x


@gluon.constexpr_function
def _row_layout(C, unit):
    """Of [R, C], in which a warp has whole pieces of rows, `unit` columns a thread."""
    lanes = min(32, C // unit)
    return gl.BlockedLayout([1, unit], [32 // lanes, lanes], [4, 1], [1, 0])


@gluon.jit
def _store_broken_rows(
    problem, x, row0, column0, R: gl.constexpr, C: gl.constexpr, columns_of_result
):
    """x [R, C] into a result whose rows the copy engine cannot address, row by row."""
    unit: gl.constexpr = problem.out_unit
    layout: gl.constexpr = _row_layout(C, unit)
    x = gl.convert_layout(x, layout)
    rows = gl.expand_dims(row0 + gl.arange(0, R, rows_of(layout)), 1)
    columns = gl.expand_dims(column0 + gl.arange(0, C, columns_of(layout)), 0)
    end = columns_of_result // unit * unit  # all of them, as the compiler cannot know
    at = problem.out + rows.to(gl.int64) * problem.out_stride + columns
    size: gl.constexpr = unit * x.dtype.itemsize
    at = gl.max_contiguous(gl.multiple_of(at, [1, size]), [1, unit])
    gl.store(at, x, mask=(rows < problem.m) & (columns < end))


@gluon.constexpr_function
def parts_of(size, part):
    return -(-size // part)


@gluon.constexpr_function
def _pending(chunks, buffers, first):
    """Stores that may still read their buffers when the next one is filled. A tile begins with the first
    buffer, so that where it has not as many chunks as make it end with the last, its first chunk
    waits for all stores of the tile before."""
    return 0 if first and chunks % buffers else buffers - 1


@gluon.jit
def _store_chunk(
    problem, x, value, out_desc, out_tiles, group: gl.constexpr, row0, column0,
    within: gl.constexpr, chunks: gl.constexpr, R: gl.constexpr, C: gl.constexpr,
    buffers: gl.constexpr, bits: gl.constexpr,
):  # fmt: skip
    """One chunk of a result: what follows the product, and the store.

    value: what a gate multiplies (not used where there is none).
    within: the chunk's first column in this warpgroup's part of a tile, which has `chunks` of them. The
        last one may begin inside the one before.
    """
    number: gl.constexpr = (within + C - 1) // C
    layout: gl.constexpr = accumulator_layout(C, bits)
    dtype: gl.constexpr = out_desc.dtype
    rows = row0 + gl.arange(0, R, rows_of(layout))
    columns = column0 + within + gl.arange(0, C, columns_of(layout))
    out_n = problem.n
    if problem.gated:
        out_n = problem.n // 2
        # The gate's last box may run into the columns of the values; what it makes is not stored.
        x = _before_activation(problem, x, rows, columns)
        value = _before_activation(problem, value, rows, columns + out_n)
        x = activate(x, problem.activation) * value
    else:
        x = activate(_before_activation(problem, x, rows, columns), problem.activation)
    if problem.has_residual:
        wide_rows = gl.expand_dims(rows, 1).to(gl.int64)
        inside = gl.expand_dims(rows < problem.m, 1) & gl.expand_dims(columns < out_n, 0)
        at = problem.residual + wide_rows * problem.residual_stride + gl.expand_dims(columns, 0)
        x = x + gl.load(at, mask=inside, other=0.0).to(gl.float32)
    if dtype != gl.float32:
        x = narrow(x, dtype)
    if problem.transposed:
        out = out_tiles.index(group * buffers + number % buffers)
        tma_store_wait(_pending(chunks, buffers, within == 0))
        out.store(x.permute((1, 0)))
        fence_async_shared()
        tma_store(out_desc, (column0 + within, row0), out)
    elif problem.out_unit == 0:
        out = out_tiles.index(group * buffers + number % buffers)
        tma_store_wait(_pending(chunks, buffers, within == 0))
        out.store(x)
        fence_async_shared()
        tma_store(out_desc, (row0, column0 + within), out)
    else:
        _store_broken_rows(problem, x, row0, column0 + within, R, C, out_n)


@gluon.jit
def store_tile(
    problem, x, value, others, out_desc, out_tiles, group: gl.constexpr, row0, column0,
    within: gl.constexpr, size: gl.constexpr, added: gl.constexpr, R: gl.constexpr,
    C: gl.constexpr, buffers: gl.constexpr, bits: gl.constexpr,
):  # fmt: skip
    """x [R, C] with the parts of `others`, chunk by chunk, through `buffers` shared tiles.

    within: x's first column in this warpgroup's part of a tile, of `size` elements.
    added: the parts have been added already.
    """
    chunk: gl.constexpr = out_desc.block_shape[0 if problem.transposed else 1]
    # As many columns at a time as registers allow, since every time waits for the memory.
    enough: gl.constexpr = (ELEMENTS // 2 if problem.gated else ELEMENTS) >= R * C
    if enough and not added:
        layout: gl.constexpr = accumulator_layout(C, bits)
        cta = gl.program_id(0)
        rows_left = problem.m - row0
        x = add_parts(problem, x, cta, others, group, rows_left, size, within, R, C, layout)
        if problem.gated:
            half_of_part: gl.constexpr = size // R // 2
            value = add_parts(
                problem, value, cta, others, group, rows_left, size, half_of_part + within, R, C,
                layout,
            )  # fmt: skip
    done: gl.constexpr = added or enough
    if chunk < C:
        half: gl.constexpr = C // 2
        left, right = halves(x, R, C, bits)
        if problem.gated:
            value_left, value_right = halves(value, R, C, bits)
        else:
            value_left = left
            value_right = right
        store_tile(
            problem, left, value_left, others, out_desc, out_tiles, group, row0, column0, within,
            size, done, R, half, buffers, bits,
        )  # fmt: skip
        store_tile(
            problem, right, value_right, others, out_desc, out_tiles, group, row0, column0,
            within + half, size, done, R, half, buffers, bits,
        )  # fmt: skip
    else:
        chunks: gl.constexpr = parts_of(size // (2 if problem.gated else 1), R * C)
        _store_chunk(
            problem, x, value, out_desc, out_tiles, group, row0, column0, within, chunks, R, C,
            buffers, bits,
        )  # fmt: skip
