"""Rows that begin anywhere, read in whole vectors of 16 bytes: elements are moved in registers.

    low, high = the vectors that an element's place falls into, and the next ones
    x = shifted(low, high, shift)        # from byte `shift` of each pair of vectors on

A vector that holds a byte of a tensor lies in its memory's page, so that reading all of it is safe.
"""
# mypy: disable-error-code="no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

VECTOR = gl.constexpr(8)  # elements of 2 bytes
VECTOR_BYTES = 16


@gluon.constexpr_function
def _instructions():
    """$0 to $3: four words from byte $12 on of the eight words $4 to $11."""
    lines = [".reg .pred two, one;", ".reg .b32 a<6>, b<5>, bits;"]
    lines += ["and.b32 bits, $12, 8;", "setp.ne.b32 two, bits, 0;"]
    lines += ["and.b32 bits, $12, 4;", "setp.ne.b32 one, bits, 0;"]
    lines += ["shl.b32 bits, $12, 3;"]  # of which the funnel shift takes 5 bits
    lines += [f"selp.b32 a{i}, ${i + 6}, ${i + 4}, two;" for i in range(6)]
    lines += [f"selp.b32 b{i}, a{i + 1}, a{i}, one;" for i in range(5)]
    lines += [f"shf.r.wrap.b32 ${i}, b{i}, b{i + 1}, bits;" for i in range(4)]
    return "{" + " ".join(lines) + "}"


@gluon.jit
def shifted(low, high, shift):
    """Elements of 2 bytes, [.., vectors of 8], eight a thread. shift: int32, 0 to 15, alike in a vector."""
    return gl.inline_asm_elementwise(
        _instructions(),
        "=&r,=&r,=&r,=&r" + ",r" * 16,
        [low, high, shift],
        dtype=low.dtype,
        is_pure=True,
        pack=8,
    )
