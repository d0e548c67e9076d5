"""One copy of the consumers' code for all warpgroups of a kernel.

Triton gives each role of a warp-specialised kernel code of its own. Consumers that do the same to other rows are
most of a kernel, and all of it was compiled once for each of them. Where `triton_version.specialize` is told that
they are alike, Triton sees one consumer, as its first worker, and a default role (and a second worker, for three
consumers) with nothing to do. In the LLVM IR that it makes of this, `merged` sends all of them to the consumer's
code, where

- a thread's number is what it would be in the first worker, 128 to 255, and a warpgroup's own number is read from
  the hardware (tile/roles.py);
- the barrier of a role's warps, which Triton numbers by role, is 2 + the warpgroup's number: no other role of
  four warps is left that has one;
- all warpgroups end with the kernel, instead of waiting for further roles, so that the code is no part of a loop.

Shared memory that Triton allocates by itself for what a role does (layouts converted, sums over warps) would be
one piece for all consumers, so that what needs it is refused (`refuse_memory`, 0.04 s of a compilation).
"""

from __future__ import annotations

import re
import tempfile
from typing import Any

# In the piece of assembly by which a consumer reads its number: a comment, and how many consumers there are.
MARK = "// one copy for all consumers:"

_WAIT = r"  (?:tail )?call void @llvm\.nvvm\.barrier\.cta\.sync\.all\(i32 1\).*\n"
_REGISTERS = r"  (?:tail )?call void @llvm\.nvvm\.setmaxnreg\..*\n"
_ROLE_BARRIER = r"(@llvm\.nvvm\.barrier\.cta\.sync\.aligned\.count\()i32 2, i32 128\)"
_NAME = re.compile(r"%[\w.$-]+")
_PURE = r"  %\S+ = (and|or|xor|add|sub|shl|lshr|ashr|mul|icmp|zext|sext|trunc|select|(tail )?call i32 @llvm\.nvvm\.shfl)\b"
_HOPPER, _PTX_VERSION = 90, 80
_MEET = "  call void @llvm.nvvm.barrier.cta.sync.all(i32 1)\n"


def refuse_memory(module: Any) -> None:
    """Raises ValueError where consumers in one copy do what Triton gives them shared memory for.

    module: the kernel in TTGIR, which stays as it is.
    """
    if MARK not in (text := str(module)):
        return
    from triton._C.libtriton import ir, nvidia, passes

    context = ir.context()
    ir.load_dialects(context)
    nvidia.load_dialects(context)
    with tempfile.NamedTemporaryFile("w", suffix=".ttgir") as file:
        file.write(text)
        file.flush()
        copy = ir.parse_mlir_module(file.name, context)
    before_llvm = ir.pass_manager(context)
    passes.ttgpuir.add_allocate_warp_groups(before_llvm)
    passes.convert.add_scf_to_cf(before_llvm)
    passes.gluon.add_inliner(before_llvm)
    nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(before_llvm, _HOPPER, _PTX_VERSION)
    before_llvm.run(copy, "shared memory of consumers")
    text = str(copy)
    consumer = text[text.index("partition0(") : text.index("partition1(")]
    if found := [line.strip() for line in consumer.splitlines() if "allocation.offset" in line]:
        raise ValueError(
            "warpgroups that share their code cannot do what needs shared memory of each; a score_mod or mask_mod "
            f"must be elementwise, without sums, atomics or conversions of layouts: {found[0]}"
        )


def merged(text: str) -> str:
    """A kernel's LLVM IR, as Triton 3.6 makes it, with all consumers in one piece of code.

    Text without the mark comes back as it is.

    Raises:
        ValueError: the text is not as Triton 3.6 makes it.
    """
    marked = re.search(re.escape(MARK) + r" (\d)", text)
    if marked is None:
        return text
    tid = _one(r"(%\d+) = (?:tail )?call i32 @llvm\.nvvm\.read\.ptx\.sreg\.tid\.x\(\)", text)
    # The first of these is that of the roles; code of consumers may have others.
    roles = re.search(r"  switch i8 .*?\n  \]", text, re.DOTALL)
    cases = dict(re.findall(r"i8 (\d+), label %(\S+)\n", roles[0] if roles else ""))
    _expect({"0", "1"} <= cases.keys(), "a switch of roles")
    first, second = cases["0"], cases["1"]
    text, after = _default_role_sent(text)
    begin, end = text.index(f"\n{first}:"), text.index(f"\n{second}:")
    head, code, tail = _split(_WAIT, text[begin:end], 2)
    # Arguments come through shared memory, which is another's once all roles have met.
    lines = head.splitlines(keepends=True)
    arguments = "".join(line for line in lines if " load " in line)
    head = "".join(line for line in lines if " load " not in line)
    code = code.replace(f", %{first} ]", ", %consume ]")
    anew, code = _own(tid, text[:begin], code, text[end:])
    code = re.sub(_ROLE_BARRIER, r"\1i32 %own.barrier, i32 128)", code)
    consume = (
        f"{head}  br label %consume\n\nconsume:\n{arguments}{_MEET}"
        f"  %own.low = and i32 {tid}, 127\n  %own.thread = or i32 %own.low, 128\n"
        f"  %own.number = lshr i32 {tid}, 7\n  %own.barrier = add i32 %own.number, 2\n"
        f"{anew}{code}"
        f"  %own.default = icmp ult i32 {tid}, 128\n"
        f"  br i1 %own.default, label %{after}, label %consumed\n\nconsumed:\n"
        # They give registers back, as others want more, and meet the default role at the kernel's end.
        f"{_MEET}{_one(rf'^{_REGISTERS}', tail)}{_MEET}  ret void\n\n"
    )
    text = text[:begin] + consume + text[end:]
    for worker in range(1, int(marked[1]) - 1):
        case = f"    i8 {worker}, label %"
        text = text.replace(f"{case}{cases[str(worker)]}\n", f"{case}{first}\n")
    return text


def _default_role_sent(text: str) -> tuple[str, str]:
    """With the default role, in which nothing is done, sent to the consumers; the block that comes after."""
    entry = re.search(r"icmp ult i32 %\d+, 4\b.*\n  br i1 %\d+, label %(\S+), label", text)
    _expect(entry is not None, "a branch to the default role")
    assert entry is not None
    begin = text.index(f"\n{entry[1]}:")
    # It wakes the other roles, changes its registers, and meets them: before and after what it would do.
    empty = rf"{_REGISTERS}({_WAIT})(  br label %(\d+).*\n\n\3:.*\n)?{_WAIT}"
    found = re.compile(empty).search(text, begin)
    _expect(found is not None, "a default role with nothing to do")
    assert found is not None
    before, after = text[: found.start(1)] + "  br label %consume\n\n", text[found.end(1) :]
    if found[3]:  # LLVM has not joined its blocks
        return before + after.split("\n\n", 1)[1], found[3]
    return f"{before}after:\n{after}", "after"


def _own(thread: str, before: str, code: str, beyond: str) -> tuple[str, str]:
    """Instructions that make anew, of the thread's own number, what `code` uses of values that were made of
    `thread` before it; and `code` with the new ones in their place."""
    made: dict[str, str] = {}
    for line in before.splitlines():
        name, _, value = line.strip().partition(" = ")
        if value and {*made, thread} & _names(value):
            made[name] = line
    used = _names(code)
    for name in reversed(made):
        if name in used:
            used |= _names(made[name])
    needed = [name for name in made if name in used]
    for target in set(re.findall(r"label %([\w.$-]+)", code)):
        # Triton's MLIR puts a few blocks of arithmetic at the function's end.
        if block := re.search(rf"^{re.escape(target)}:.*?\n\n", beyond, re.DOTALL | re.MULTILINE):
            alike = not {thread, *made} & _names(block[0]) and "barrier" not in block[0]
            _expect(alike, f"a block beyond the role that is alike in all roles: {block[0]}")

    def renamed(text: str) -> str:
        return _NAME.sub(lambda name: renames.get(name[0], name[0]), text)

    renames = {thread: "%own.thread"} | {name: f"%own.{name[1:]}" for name in needed}
    for name in needed:
        _expect(re.match(_PURE, made[name]) is not None, f"nothing but arithmetic: {made[name]}")
    return "".join(renamed(made[name]) + "\n" for name in needed), renamed(code)


def _names(text: str) -> set[str]:
    return set(_NAME.findall(text))


def _one(pattern: str, text: str) -> str:
    found: list[str] = re.findall(pattern, text, re.MULTILINE)
    _expect(len(found) == 1, f"one {pattern}")
    return found[0]


def _split(pattern: str, text: str, cuts: int) -> list[str]:
    pieces = re.split(pattern, text)
    _expect(len(pieces) == cuts + 1, f"{cuts} of {pattern}")
    return pieces


def _expect(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"Triton's LLVM IR is not as expected: {what}")
