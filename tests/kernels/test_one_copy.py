"""Consumers that share one copy of their code: text, machine code, the simulator (two copies) and the GPU."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.gluon_sim import load_simulated, simulation

triton = pytest.importorskip("triton", reason="Triton is not installed")
if not triton.__version__.startswith("3.6."):
    pytest.skip("only Triton 3.6's consumers share their code", allow_module_level=True)

from rooftile.kernels import triton_version  # noqa: E402
from rooftile.kernels.one_copy import MARK, merged  # noqa: E402
from tests.kernels.gluon_pieces import tell  # noqa: E402
from tests.support.machine_code import MachineCode, compile_for_hopper  # noqa: E402

TYPES = {
    "x": "*i32",
    "counters": "*i32",
    "out": "*i32",
    "turns": "*i32",
    "rounds": "i32",
    "limit": "i32",
}


def told(kernel: Any, device: str, rounds: int, groups: int, one_copy: bool) -> None:
    generator = torch.Generator().manual_seed(rounds)
    x = torch.randint(0, 102, (rounds, groups, 128), generator=generator, dtype=torch.int32)
    x[:, :, :] = torch.where(torch.arange(groups)[None, :, None] % 2 == 0, x, x.clamp(max=99))
    last = torch.zeros_like(x)
    last[-1] = 10000
    expected = x + 1000 * (x > 99).any(-1, keepdim=True) + last
    counters = torch.zeros(groups, dtype=torch.int32, device=device)
    out, turns = torch.full_like(x, -1).to(device), torch.zeros(1, dtype=torch.int32, device=device)
    kernel[(1,)](x.to(device), counters, out, turns, rounds, 99, groups, one_copy, False)
    assert torch.equal(out.cpu(), expected.int())
    assert counters.tolist() == [rounds] * groups
    assert turns.item() == rounds


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_what_warps_tell_each_other(groups: int) -> None:
    kernel = load_simulated("tests.kernels.gluon_pieces").tell
    for seed in range(3):
        with simulation(seed=seed):
            told(kernel, "cpu", 5, groups, True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("one_copy", [True, False])
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_what_warps_tell_each_other_on_a_gpu(groups: int, one_copy: bool) -> None:
    for rounds in (1, 7, 1000):
        told(tell, "cuda", rounds, groups, one_copy)


def code_of(groups: int, one_copy: bool, sums: bool = False) -> MachineCode:
    values = {"groups": groups, "one_copy": one_copy, "sums": sums}
    return compile_for_hopper(tell, TYPES, values)


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_all_consumers_share_their_code(groups: int) -> None:
    assert code_of(groups, True).count("ATOMG") == 1
    assert code_of(groups, False).count("ATOMG") == groups


def test_what_needs_memory_that_triton_allocates_is_refused() -> None:
    """A sum over a warpgroup, which two warpgroups would write to the same place."""
    with pytest.raises(ValueError, match="must be elementwise"):
        code_of(2, True, sums=True)
    code_of(2, False, sums=True)


@pytest.mark.parametrize("groups", [2, 3])
def test_threads_and_barriers_of_the_shared_code(
    groups: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = []

    def kept(text: str) -> str:
        texts.append(merged(text))
        return texts[-1]

    monkeypatch.setattr(triton_version, "merged", kept)
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path)
        code_of(groups, True)
    (text,) = texts
    thread = re.findall(r"(%\d+) = .*call i32 @llvm.nvvm.read.ptx.sreg.tid.x", text)[0]
    code = text[text.index("\nconsume:") : text.index("\nconsumed:")]
    of_thread = [x.split(" = ")[0].strip() for x in code.splitlines() if f"{thread}," in x]
    assert of_thread == ["%own.low", "%own.number", "%own.default"]
    barriers = re.findall(r"barrier\.cta\.sync\.aligned\.count\(i32 (\S+), i32 128\)", code)
    assert set(barriers) == {"%own.barrier"}
    assert "%own.barrier = add i32 %own.number, 2\n" in code
    # The default role and, of three, the second worker run it, too.
    assert text.count("label %consume\n") + text.count("label %consume,") == 2
    switch = text[text.index("switch i8") :]
    cases = dict(re.findall(r"i8 (\d), label (%\S+)", switch[: switch.index("]")]))
    assert (cases["0"] == cases["1"]) == (groups == 3)


def test_a_hook_of_somebody_else_does_not_keep_ours_away() -> None:
    """In a process of its own, since what is hooked stays so."""
    script = (
        "from functools import wraps\n"
        "from triton.backends.nvidia.compiler import CUDABackend as backend\n"
        "make = backend.make_llir\n"
        "backend.make_llir = wraps(make)(lambda *args: make(*args))\n"
        "from tests.kernels.test_one_copy import code_of\n"
        "import tempfile, triton\n"
        "triton.knobs.cache.dir = tempfile.mkdtemp()\n"
        "assert 'bar.sync \\t2, 128' not in code_of(2, True).ptx\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_other_text_is_left_alone() -> None:
    text = "define void @kernel() {\n  ret void\n}\n"
    assert merged(text) == text


def test_text_of_another_triton_is_refused() -> None:
    with pytest.raises(ValueError, match="not as expected"):
        merged(f"define void @kernel() {{\n  call void asm {MARK} 2\n  ret void\n}}\n")
