"""Consumers that share one copy of their code, as far as text and machine code show it."""

from __future__ import annotations

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed")
if not triton.__version__.startswith("3.6."):
    pytest.skip("only Triton 3.6's consumers share their code", allow_module_level=True)

from triton.experimental import gluon  # noqa: E402
from triton.experimental.gluon import language as gl  # noqa: E402

from rooftile.kernels.gluon.tile.roles import specialize, warpgroup  # noqa: E402
from rooftile.kernels.gluon.tile.said import add_once, any_of  # noqa: E402
from rooftile.kernels.one_copy import MARK, merged  # noqa: E402
from tests.support.machine_code import MachineCode, compile_for_hopper  # noqa: E402

TYPES = {"x": "*fp32", "counter": "*i32", "out": "*fp32", "n": "i32"}


@gluon.jit
def _consume(
    x, counter, out, n, said, sums: gl.constexpr, groups: gl.constexpr, of_group: gl.constexpr
):  # type: ignore[no-untyped-def]
    group = warpgroup(of_group, groups)
    at = group * 128 + gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    value = gl.sin(gl.load(x + at))
    first, before = add_once(counter + group, 1)
    if any_of(said.index(group), first & (before == n)):
        value = value * 2.0
    if sums:
        value = value + gl.sum(value, 0)
    gl.store(out + at, value)


@gluon.jit
def _nothing(n):  # type: ignore[no-untyped-def]
    pass


@gluon.jit
def _kernel(x, counter, out, n, groups: gl.constexpr, one_copy: gl.constexpr, sums: gl.constexpr):  # type: ignore[no-untyped-def]
    said = gl.allocate_shared_memory(gl.int8, [groups, 4], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    specialize(
        _consume,
        (x, counter, out, n, said, sums, groups),
        groups,
        120,
        [(_nothing, (n,))],
        24,
        one_copy,
    )


def code_of(groups: int, one_copy: bool, sums: bool = False) -> MachineCode:
    return compile_for_hopper(
        _kernel, TYPES, {"groups": groups, "one_copy": one_copy, "sums": sums}
    )


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_all_consumers_share_their_code(groups: int) -> None:
    assert code_of(groups, True).count("ATOMG") == 1
    assert code_of(groups, False).count("ATOMG") == groups


def test_consumers_in_one_copy_have_no_memory_that_triton_allocates() -> None:
    """A sum over a warpgroup takes some, which two warpgroups would write at a time."""
    with pytest.raises(AssertionError, match=r"tt\.reduce|allocation\.offset"):
        code_of(2, True, sums=True)
    code_of(2, False, sums=True)


def test_other_text_is_left_alone() -> None:
    text = "define void @kernel() {\n  ret void\n}\n"
    assert merged(text) == text


def test_text_of_another_triton_is_refused() -> None:
    with pytest.raises(ValueError, match="not as expected"):
        merged(f"define void @kernel() {{\n  call void asm {MARK} 2\n  ret void\n}}\n")
