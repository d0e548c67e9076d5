"""Numbers that the compiler does not see through, or does not have to set.

    if opaque(with_lse) > 0:  # compared here, not at the kernel's start

What follows from a kernel's arguments alone LLVM works out once, at the kernel's start, for all of its
roles. There nobody has asked for the arguments yet, and every warp waits for them to come from memory.
"""
# mypy: disable-error-code="no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def opaque(x):
    """x, an int32, which for the compiler might be any: what is worked out from it stays where it is."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [gl.to_tensor(x)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def unset(like):
    """Float32 in the layout of `like`, int32, for a name that is read only where it is set again: a number in
    its place would be moved into registers in every round of a loop."""
    return gl.inline_asm_elementwise("", "=f,r", [like], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def moved(x, after):
    """x, float32, by an instruction that comes after `after` is known: into the place of what only that was made
    from, where a loop that changes x in some rounds would move it in all others."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=f,f,f", [x, after], dtype=gl.float32, is_pure=True, pack=1
    )
