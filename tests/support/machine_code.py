"""Compiles kernels for sm_90a on a machine without a GPU and reads what ptxas made of them.

code = compile_for_hopper(kernel, {"x": "*fp32", "n": "i32"}, {"BLOCK": 128})
assert not code.spills() and code.count("HGMMA")
for loop in code.product_loops():
    assert loop.hazards() == [] and loop.overlapped_exponentials() >= 60
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon import language as gl

from rooftile.kernels.gluon.first_call import optimised, unchecked
from rooftile.kernels.triton_version import GluonASTSource, translate_sooner

TOOLS = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin")
HOPPER = 90
SHARED_MEMORY = 227 * 1024  # bytes that one CTA of sm_90 may have
_TYPE_NAMES = {
    gl.bfloat16: "bf16",
    gl.float16: "fp16",
    gl.float32: "fp32",
    gl.float8e4nv: "fp8e4nv",
}
_INSTRUCTION = re.compile(r"\s+/\*([0-9a-f]{4,6})\*/\s+(.*?);")
_PREDICATE = re.compile(r"^@!?U?P\w+\s+")
_SHARED_ACCESS = re.compile(r"\b(ld|st)\.shared(?:\.v(\d))?\.[a-z](\d+)\s")
_SHARED_PLACE = re.compile(r"\[global_smem(?:\+(\d+))?\]")


def descriptor_type(box: list[int], dtype: Any = gl.bfloat16) -> str:
    """The type of a tensor-descriptor argument for boxes of this shape."""
    layout = gl.NVMMASharedLayout.get_default_for(box, dtype)
    return f"tensordesc<{_TYPE_NAMES[dtype]}{box},{layout!r}>"


def compile_for_hopper(
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    num_warps: int = 4,
    most_registers: int | None = None,
) -> MachineCode:
    """types: of the run-time arguments; constants: the compile-time ones; most_registers: of a thread
    at launch, `None` for the compiler's choice. Whatever is compiled is checked for what is wrong in every
    kernel: see `MachineCode.told_too_early`."""
    signature = {n: "constexpr" if n in constants else types[n] for n in kernel.arg_names}
    source_type = GluonASTSource if kernel.is_gluon() else ASTSource
    source = source_type(fn=kernel, signature=signature, constexprs=dict(constants))
    options = {"num_warps": num_warps, "maxnreg": most_registers, **unchecked()}
    translate_sooner()
    with optimised(kernel, constants):
        compiled = triton.compile(source, target=GPUTarget("cuda", HOPPER, 32), options=options)
    code = _disassemble(compiled.asm["cubin"])
    functions = re.findall(r'func private @"?([\w.]+?)__', compiled.asm["source"])
    result = MachineCode(code, compiled.metadata.shared, compiled.asm["ptx"], functions)
    assert not result.told_too_early(), result.told_too_early()
    return result


def _disassemble(cubin: bytes) -> list[Instruction]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [os.path.join(TOOLS, "cuobjdump"), "-sass", file.name]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = (_INSTRUCTION.match(line) for line in listing.splitlines())
    return [Instruction(int(m[1], 16), m[2].strip()) for m in found if m]


@dataclass(frozen=True)
class Instruction:
    address: int
    text: str  # with its predicate

    @property
    def bare(self) -> str:
        return _PREDICATE.sub("", self.text)

    @property
    def name(self) -> str:
        return self.bare.split()[0]

    def registers_written(self) -> set[int]:
        """Vector registers that an ordinary instruction writes."""
        if self.name.startswith(("ST", "BAR", "SYNCS", "HGMMA", "WARPGROUP", "UTMA", "BRA", "RED")):
            return set()
        match = re.match(r"\S+\s+(?:P\d, |PT, )*R(\d+)", self.bare)
        if not match:
            return set()
        wide = re.search(r"\.(64|128)\b|\.WIDE\b", self.name) or self.name.startswith("CS2R")
        count = 4 if ".128" in self.name else 2 if wide else 1
        return set(range(int(match[1]), int(match[1]) + count))

    def registers_in_flight(self) -> set[int]:
        """Registers that a wgmma reads or writes until it is waited for."""
        columns = int(re.search(r"64x(\d+)x", self.name)[1])  # type: ignore[index]
        accumulator = int(re.search(r"\bR(\d+)\b", self.bare)[1])  # type: ignore[index]
        registers = set(range(accumulator, accumulator + columns // 2))
        left = re.match(r"HGMMA\S+\s+R\d+, R(\d+), gdesc", self.bare)
        if left:
            registers |= set(range(int(left[1]), int(left[1]) + 4))
        return registers


@dataclass
class Loop:
    body: list[Instruction]

    def hazards(self) -> list[Instruction]:
        """Instructions that write a register of a product still in flight (a linear scan)."""
        groups: list[set[int]] = []
        current: set[int] = set()
        bad = []
        for instruction in self.body:
            if instruction.name.startswith("HGMMA"):
                current |= instruction.registers_in_flight()
                if "gsb0" in instruction.text:
                    groups.append(current)
                    current = set()
            elif instruction.name.startswith("WARPGROUP.DEPBAR"):
                left = int(instruction.text.split()[-1], 16)
                groups = groups[len(groups) - left :] if left else []
            elif any(instruction.registers_written() & group for group in [*groups, current]):
                bad.append(instruction)
        return bad

    def overlapped_exponentials(self) -> int:
        """MUFU.EX2 between the wait for the scores and the wait for the output product."""
        waits = [
            (i, int(x.text.split()[-1], 16))
            for i, x in enumerate(self.body)
            if x.name.startswith("WARPGROUP.DEPBAR")
        ]
        best = 0
        for (start, left), (end, next_left) in itertools.pairwise(waits):
            if left == 1 and next_left == 0:
                names = [x.name for x in self.body[start:end]]
                best = max(best, sum(name.startswith("MUFU.EX2") for name in names))
        return best

    def count(self, prefix: str) -> int:
        return sum(x.name.startswith(prefix) for x in self.body)


def _overlap(a: tuple[int, int], b: tuple[int, int]) -> bool:
    return max(a[0], b[0]) < min(a[1], b[1])


@dataclass
class MachineCode:
    instructions: list[Instruction] = field(repr=False)
    shared_bytes: int
    ptx: str = field(default="", repr=False)
    functions: list[str] = field(default_factory=list, repr=False)  # one for each translation

    def count(self, prefix: str) -> int:
        """How many instructions have a name that begins so."""
        return sum(x.name.startswith(prefix) for x in self.instructions)

    def spills(self) -> int:
        """Accesses to local memory."""
        return self.count("LDL") + self.count("STL")

    def told_too_early(self) -> list[str]:
        """Writes of what roles are told, into shared memory that another warp may be reading still.

        The first warps write their roles' arguments before they meet the others. Triton 3.6 puts them where
        a reduction has left its result, say, and no barrier between a warp's reading that and another's
        writing. What roles are told has fixed places; reads by registers are taken to be anywhere.
        """
        bad: list[str] = []
        reads: list[tuple[int, int] | None] = []  # since the warps have last met
        writes: list[str] = []
        for line in self.ptx.splitlines():
            access = _SHARED_ACCESS.search(line)
            if re.search(r"\bbar(rier)?(\.cta)?\.sync\b", line):
                if re.search(r"\bbarrier\.sync\s+1;", line):  # where roles begin
                    bad += writes
                reads, writes = [], []
            elif access:
                kind, vector, bits = access.groups()
                place = _SHARED_PLACE.search(line)
                span = None
                if place:
                    begin = int(place[1] or 0)
                    span = begin, begin + int(vector or 1) * int(bits) // 8
                if kind == "ld":
                    reads.append(span)
                elif span and any(x is None or _overlap(x, span) for x in reads):
                    writes.append(line.strip())
        return bad

    def loops(self) -> list[Loop]:
        """The span of every backward branch, inner and outer."""
        index = {x.address: i for i, x in enumerate(self.instructions)}
        loops = []
        for i, x in enumerate(self.instructions):
            target = re.search(r"\bBRA(?:\.\S+)?\s+.*?(0x[0-9a-f]+)", x.text)
            if target and int(target[1], 16) <= x.address:
                loops.append(Loop(self.instructions[index[int(target[1], 16)] : i + 1]))
        return loops

    def product_loops(self) -> list[Loop]:
        """Innermost loops that multiply: one for each consumer role."""
        loops = [loop for loop in self.loops() if loop.count("HGMMA")]
        spans = [(loop.body[0].address, loop.body[-1].address, loop) for loop in loops]
        return [
            loop
            for lo, hi, loop in spans
            if not any(lo <= a and b <= hi and (a, b) != (lo, hi) for a, b, _ in spans)
        ]
