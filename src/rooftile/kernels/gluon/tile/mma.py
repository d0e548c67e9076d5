"""Warpgroup matrix products (wgmma) and the register layouts they need.

    S: gl.constexpr = accumulator_layout(128)         # of scores [64, 128]
    O: gl.constexpr = accumulator_layout(64)          # of outputs [64, 64]
    s = multiply(q, k.permute((1, 0)), gl.zeros([64, 128], gl.float32, S), use_acc=False)
    s = wait(0, deps=[s])
    p = gl.convert_layout(s.to(gl.bfloat16), left_operand_layout(O))
    o = multiply(p, v, o)                             # p from registers, v from shared memory
    o, p = wait(0, deps=[o, p])

One warpgroup multiplies 64 rows. A product is asynchronous: its result, and the registers and
shared tiles it reads, must be left alone until `wait(n)`, n being how many later products may
still be in flight. Whatever must not move above a wait goes through its `deps`.
"""
# mypy: disable-error-code="no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

GROUP_ROWS = gl.constexpr(64)  # rows that one warpgroup multiplies

wait = warpgroup_mma_wait


@gluon.constexpr_function
def accumulator_layout(columns, bits=16):
    """Layout of a [64, columns] float32 accumulator of one warpgroup; bits: of an operand."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 256 // bits]
    )


@gluon.constexpr_function
def left_operand_layout(accumulator):
    """Layout of a 16-bit left operand in registers, for products into `accumulator`."""
    return gl.DotOperandLayout(operand_index=0, parent=accumulator, k_width=2)


@gluon.constexpr_function
def rows_of(layout):
    """Layout of a vector with one value per row of a tile in `layout`."""
    return gl.SliceLayout(1, layout)


@gluon.constexpr_function
def columns_of(layout):
    """Layout of a vector with one value per column of a tile in `layout`."""
    return gl.SliceLayout(0, layout)


@gluon.jit
def multiply(a, b, acc, use_acc=True):
    """Starts acc = a @ b (+ acc); a [64, K] in registers or shared memory, b [K, N] shared."""
    return warpgroup_mma(a, b, acc, use_acc=use_acc, is_async=True)


@gluon.jit
def narrow(x, dtype: gl.constexpr):
    """x [rows, columns] float32 as bfloat16 or float16, two elements an instruction.

    A plain conversion carried around a loop is taken apart and put together again by the compiler
    (one PRMT for every pair at head dim 64).
    """
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=gl.bfloat16, is_pure=True, pack=2
        )
    else:
        return gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=gl.float16, is_pure=True, pack=2
        )
