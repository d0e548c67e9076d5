"""Fetching tensor maps before the copy engine asks for them.

A map lies among a kernel's arguments, in memory that nobody has touched before a launch; fetched when
the first copy needs it, it adds a trip to memory to that copy's own.
"""
# mypy: disable-error-code="no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def _prefetch_asm(kernel, numbers):
    lines = [".reg .b64 map;"]
    for number in numbers:
        lines += [
            f"mov.b64 map, {kernel}_param_{number};",
            "cvta.param.u64 map, map;",
            "prefetch.tensormap [map];",
        ]
    return "{" + " ".join(lines) + "} mov.b32 $0, $1;"


@gluon.jit
def prefetch_maps(kernel: gl.constexpr, numbers: gl.constexpr):
    """Starts fetching the maps of a kernel's descriptors.

    kernel: the function's name. numbers: of the parameters that hold them; a descriptor of d
    dimensions is a map and 2 d sizes and strides.
    """
    gl.inline_asm_elementwise(
        _prefetch_asm(kernel, numbers),
        "=r,r",
        [gl.program_id(0)],  # the instruction needs an operand; its value does not matter
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
