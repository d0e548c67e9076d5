"""Roles of a CTA: consumer warpgroups that share one piece of code, and single warps beside them.

    specialize(attend, (problem, ring, result), 2, 232, [(load, (problem, ring))], 40)

    @gluon.jit
    def attend(problem, ring, result, group: gl.constexpr):
        number = warpgroup(group, 2)         # 0 or 1: an int32
        rows = number * 64 + ...

`specialize` takes the consumers' function and arguments, how many of them there are (1 to 3) and their registers,
then the single warps and their registers. Consumers get one more argument, their group, which
`warpgroup` makes a number of the kernel: in code that all of them share (kernels/one_copy.py) the compiler must not
know it. They tell each other nothing and take no shared memory but what they are given (tile/said.py). With False as
its last argument each has code of its own, and a group that is a constant.
"""
# mypy: disable-error-code="no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from rooftile.kernels.one_copy import MARK
from rooftile.kernels.triton_version import ANY_GROUP, specialize

__all__ = ["specialize", "warpgroup"]

_ANY = gl.constexpr(ANY_GROUP)


@gluon.constexpr_function
def _read_number(groups):
    read = "mov.u32 number, %tid.x; shr.u32 number, number, 7;"
    alike = "shfl.sync.idx.b32 $0, number, 0, 31, -1;"  # in all of a warp, as ptxas then knows
    # To go up with what one_copy.py and `specialize` do, since Triton's cache knows of this text only.
    rule = 1
    return f"{{.reg .b32 number; {read} {alike} {MARK} {groups}, {rule}\n}}"


@gluon.jit
def warpgroup(group: gl.constexpr, groups: gl.constexpr):
    """A consumer's number as an int32 of the kernel, from the group that `specialize` gives it."""
    if group == _ANY:
        return gl.inline_asm_elementwise(
            _read_number(groups), "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=True, pack=1
        )
    else:
        return gl.to_tensor(group)
