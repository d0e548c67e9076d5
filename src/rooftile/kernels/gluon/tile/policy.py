"""Which tensor copies leave their lines in the L2 cache as the first to go.

    first_to_leave(once)   # by a role that loads, before copies; once: 1, or 0 for lines to be kept as usual

Keys that are read once need not push out keys that many CTAs read again. Triton 3.6 has no word for it at a
copy: the policy is a register of the kernel's machine code, and the PTX of a kernel that sets it is
given that register at all its loads by tensor maps, as Triton hands PTX on (`say_policies`).
"""
# mypy: disable-error-code="no-untyped-def"

import re
from typing import Any

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from rooftile.kernels.triton_version import TRITON_VERSION

_REGISTER = "copy_policy"
_ENTRY = re.compile(r"^\{$", re.MULTILINE)
_LOAD = re.compile(
    r"(cp\.async\.bulk\.tensor\.\dd\.shared::cluster\.global\.mbarrier::complete_tx::bytes)"
    r"( \[[^\]]*\], \[[^\]]*\], \[[^\]]*\]);"
)
# As `createpolicy` makes it of evict_first, and what a copy without a hint has. createpolicy's evict_normal is
# another, with which shared prefixes took 3 to 8 us longer.
_FIRST, _USUAL = 0x12F0000000000000, 0x1000000000000000
_SET = gl.constexpr(
    "{ .reg .pred first; setp.ne.s32 first, $1, 0; "
    f"selp.b64 {_REGISTER}, {_FIRST:#x}, {_USUAL:#x}, first; }} mov.b32 $0, $1;"
)


@gluon.jit
def first_to_leave(once):
    """Of this role's copies from here on."""
    gl.inline_asm_elementwise(_SET, "=r,r", [once], dtype=gl.int32, is_pure=False, pack=1)


def with_policies(ptx: str) -> str:
    """PTX whose loads by tensor maps have the policy that its kernel sets, if it does."""
    if _REGISTER not in ptx:
        return ptx
    declared = f"{{\n\t.reg .b64 {_REGISTER};\n\tmov.b64 {_REGISTER}, {_USUAL:#x};"
    ptx = _ENTRY.sub(declared, ptx, count=1)
    return _LOAD.sub(rf"\1.L2::cache_hint\2, {_REGISTER};", ptx)


def say_policies() -> bool:
    """Lets kernels that are compiled from now on say policies. False: this version of Triton cannot, or
    somebody else looks at what it compiles."""
    runtime = triton.knobs.runtime
    if TRITON_VERSION != (3, 6):
        return False
    if runtime.add_stages_inspection_hook is None:
        runtime.add_stages_inspection_hook = _rewrite
    return runtime.add_stages_inspection_hook is _rewrite


def _rewrite(backend: Any, stages: dict[str, Any], *rest: Any) -> None:
    """Has `with_policies` look at every PTX."""
    make = stages.get("ptx")
    if make is not None:
        stages["ptx"] = lambda source, metadata: with_policies(make(source, metadata))
