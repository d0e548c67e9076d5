"""One kernel that starts under the end of another (programmatic dependent launch).

    let_dependents_start()        # by every CTA, early: the next kernel may take free places
    ...set up, prefetch what no kernel writes...
    await_kernels_before()        # before anything is read that the kernels before have written

The host launches such kernels with `Launch(..., dependent=True)`. A role that only touches what
arrives after another role's wait needs none of its own.
"""
# mypy: disable-error-code="no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def let_dependents_start():
    """The next kernel may be launched once every CTA has come here, or has ended."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.b32 $0, $1;",
        "=r,r",
        [gl.program_id(0)],  # the instruction needs an operand; its value does not matter
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def await_kernels_before():
    """Waits until the kernels before this one have ended and what they wrote can be read."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.b32 $0, $1;",
        "=r,r",
        [gl.program_id(0)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
