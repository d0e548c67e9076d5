"""Stand-ins for Triton's and Gluon's modules, in which device code is plain Python on torch."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.support.gluon_sim import cluster, copies, machine, packed
from tests.support.gluon_sim.barrier import MBarrierLayout
from tests.support.gluon_sim.errors import SimulationError
from tests.support.gluon_sim.memory import Descriptor, Pointer, SharedTile, Tile, tile

ROWS_OF_A_WARP = 16


class Layout:
    """A register or shared layout: kept out of the simulation."""

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    @staticmethod
    def get_default_for(*args: Any, **options: Any) -> Layout:
        return Layout()


class Jitted:
    """A jitted function: called, it runs in the current role; indexed by a grid, it launches."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.__name__ = function.__name__
        self.__doc__ = function.__doc__

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.function(*args, **options)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else self.function.__get__(instance, owner)

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **options: machine.launch(self.function, grid, *args, **options)


def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    return jit_with_options if function is None else Jitted(function)


def jit_with_options(function: Callable[..., Any]) -> Jitted:
    return Jitted(function)


def _pairwise(on_tensors: Callable[..., Any], on_numbers: Callable[..., Any]) -> Callable[..., Any]:
    def apply(a: Any, b: Any) -> Any:
        if not isinstance(a, Tensor) and not isinstance(b, Tensor):
            return on_numbers(a, b)
        like = a if isinstance(a, Tensor) else b
        a, b = (torch.as_tensor(x, dtype=like.dtype) for x in (a, b))
        return tile(on_tensors(a, b))

    return apply


def where(condition: Any, a: Any, b: Any) -> Any:
    if not any(isinstance(x, Tensor) for x in (condition, a, b)):
        return a if condition else b
    dtype = next((x.dtype for x in (a, b) if isinstance(x, Tensor)), torch.float32)
    return tile(
        torch.where(
            torch.as_tensor(condition),
            torch.as_tensor(a, dtype=dtype),
            torch.as_tensor(b, dtype=dtype),
        )
    )


def cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype)
    if isinstance(value, Pointer) or dtype.is_floating_point:
        return value
    return int(value)


def map_elementwise(function: Callable[..., Any], *args: Tensor, pack: int = 1) -> Any:
    """Calls `function` on whole columns of packs: right where it does not branch on an element."""
    args = tuple(x.as_subclass(Tensor) for x in torch.broadcast_tensors(*args))
    shape = args[0].shape
    columns = [tile(x) for arg in args for x in arg.reshape(-1, pack).unbind(1)]
    results = function(*columns)
    if not isinstance(results, tuple):
        return tile(results.reshape(shape))
    results = [x.as_subclass(Tensor) for x in results]
    return tuple(
        tile(torch.stack(results[i : i + pack], 1).reshape(shape))
        for i in range(0, len(results), pack)
    )


def inline_asm(asm: str, constraints: str, args: list[Any], **_: Any) -> Any:
    """The few instruction sequences that the tile layer uses."""
    found = re.fullmatch(r"bar\.(sync|arrive) \$1, (\d+); mov\.b32 \$0, \$1;", asm)
    if found:
        machine.named_barrier(found[1], int(args[0]), int(found[2]))
        return args[0]
    if asm == "lg2.approx.ftz.f32 $0, $1;":
        return args[0].log2()
    if asm in ("mov.b32 $0, $1;", "exit; mov.b32 $0, $1;"):
        return args[0]
    if not asm:  # what registers happen to hold
        return tile(torch.full(args[0].shape, torch.nan))
    if asm.startswith("st.shared.b32 [$2], $1;"):
        return args[0]  # to where nobody looks
    if "vote.sync.any" in asm:
        changed = (args[0] != 1.0).as_subclass(Tensor).view(-1, ROWS_OF_A_WARP)
        return tile(changed.any(1, keepdim=True).expand_as(changed).reshape(-1).to(torch.int32))
    if "bra SAME" in asm:
        x, alpha, changed = args
        return where(changed != 0, x * alpha, x)
    found = re.fullmatch(r"cvt\.rn\.(bf16|f16)x2\.f32 \$0, \$2, \$1;", asm)
    if found:
        return args[0].to(torch.bfloat16 if found[1] == "bf16" else torch.float16)
    if any(
        x in asm for x in ("griddepcontrol.", "cp.async.bulk.prefetch.", "prefetch.", "copy_policy")
    ):
        return args[0]  # launches follow one another; nothing is far away
    if "lop3.b32 pair, word, 0x000f000f, 0x43004300" in asm:
        shifts = [4 * p + 16 * e for p in range(4) for e in range(2)]
        if len(args) == 1:
            less = 8 if "sub.bf16x2" in asm else -128
            codes = ((args[0].as_subclass(Tensor) >> s) & 15 for s in shifts)
            return tuple(tile((code - less).to(torch.bfloat16)) for code in codes)
        word, scale = torch.broadcast_tensors(*(x.as_subclass(Tensor) for x in args))
        return tuple(tile((((word >> s) & 15) - 8).to(scale.dtype) * scale) for s in shifts)
    if "@out mov.f32" in asm:
        return _hidden(asm, *args)
    if "[own+" in asm:
        return _held(asm, *args)
    if "shf.r.wrap.b32" in asm:
        return _shifted(*(x.as_subclass(Tensor) for x in args))
    for known in (packed, cluster):
        answer = known.run(asm, args)
        if answer is not None:
            return answer
    raise SimulationError(f"the simulator does not know the assembly {asm!r}")


def _hidden(asm: str, s: Tensor, column: Tensor, last: Tensor, first: Any = None) -> Tile:
    """Scores [rows, columns] whose column is within the limits of its row, the others at -inf.

    Which columns the assembly takes a thread's scores for is what is simulated: those of lane 0 in
    the order of an accumulator's registers, two of every eight, of two rows.
    """
    count = s.shape[1] // 2
    columns = [int(x) for x in re.findall(r"setp\.lt\.s32 out, last\d, (\d+);", asm)]
    halves = [int(x) for x in re.findall(r"setp\.lt\.s32 out, last(\d), \d+;", asm)]
    of_registers = [(i // 2 % 2, i // 4 * 8 + i % 2) for i in range(count)]
    if list(zip(halves, columns, strict=True)) != of_registers:
        raise SimulationError("a mask takes scores for those of other columns")
    if ("setp.gt.or.s32" in asm) != (first is not None):
        raise SimulationError("a mask has a first column for each row, or none")
    column = column.as_subclass(Tensor)
    seen = column <= last.as_subclass(Tensor)
    if first is not None:
        seen = seen & (column >= first.as_subclass(Tensor))
    return tile(torch.where(seen, s.as_subclass(Tensor), -torch.inf))


def _held(asm: str, acc: Tensor, *others: Any) -> Any:
    """An accumulator [64, columns] to memory, or from there: eight columns of all rows at a time."""
    rows, columns = acc.shape
    column = torch.arange(columns)
    at = others[-1] + (column // 8 * rows * 8 + column % 8)  # from where each row begins
    offsets = [int(x) for x in re.findall(r"own\+(\d+)\]", asm)]
    pairs = [(i // 2 % 2 * 8, i // 4 * 8) for i in range(0, columns // 2, 2)]  # of lane 0
    if offsets != [4 * (c * rows + r * 8) for r, c in pairs]:
        raise SimulationError("an accumulator's values lie elsewhere")
    if "st.global" in asm:
        return machine.store(at, acc)
    shrink, weight = (x.as_subclass(Tensor) for x in others[:2])
    held = machine.load(at).as_subclass(Tensor)
    return tile(acc.as_subclass(Tensor) * shrink + held * weight)


def _shifted(low: Tensor, high: Tensor, shift: Tensor) -> Tile:
    """16 bytes from byte `shift` on of each pair of vectors."""
    pairs = [x.contiguous().view(torch.uint8).view(-1, 16) for x in (low, high)]
    first = shift.broadcast_to(low.shape).reshape(-1, 16 // low.element_size())
    if not bool((first == first[:, :1]).all()):
        raise SimulationError("a vector is shifted by different numbers")
    places = first[:, :1] + torch.arange(16)
    return tile(torch.cat(pairs, 1).gather(1, places).view(low.dtype).view(low.shape))


def _product(a: Tensor, b: Tensor, acc: Tensor) -> Tile:
    """A product of operands in registers, waited for."""
    wide = torch.int64 if a.dtype == torch.int8 else torch.float32
    products = a.as_subclass(Tensor).to(wide) @ b.as_subclass(Tensor).to(wide)
    return tile((products + acc.as_subclass(Tensor)).to(acc.dtype))


def _max(x: Tensor, axis: int) -> Any:
    """As the hardware's: NaN only where all are."""
    highest = x.amax(axis)
    if not x.is_floating_point() or not bool(highest.isnan().any()):
        return highest
    known = x.masked_fill(x.isnan(), -torch.inf).amax(axis)
    return known.masked_fill(x.isnan().all(axis), torch.nan)


def _sum(x: Tensor, axis: int) -> Any:
    total = x.sum(axis, dtype=x.dtype)
    return total if total.dim() else total.item()


def _module(name: str, **members: Any) -> ModuleType:
    module = ModuleType(name)
    module.__dict__.update(members)
    return module


def modules() -> dict[str, ModuleType]:
    """The stand-ins by the name that kernels import them under."""
    layouts = (
        "NVMMADistributedLayout",
        "DotOperandLayout",
        "SliceLayout",
        "NVMMASharedLayout",
        "BlockedLayout",
        "SwizzledSharedLayout",
        "DistributedLinearLayout",
    )
    gl = _module(
        "triton.experimental.gluon.language",
        **dict.fromkeys(layouts, Layout),
        tensor=Tile,
        shared_memory_descriptor=SharedTile,
        constexpr=lambda value: value,
        bfloat16=torch.bfloat16,
        float16=torch.float16,
        float8e4nv=torch.float8_e4m3fn,
        float32=torch.float32,
        tuple=tuple,
        int8=torch.int8,
        int16=torch.int16,
        int32=torch.int32,
        int64=torch.int64,
        static_range=range,
        static_assert=_static_assert,
        to_tensor=lambda value: value,
        cast=cast,
        cdiv=lambda a, b: -(-a // b),
        program_id=lambda axis: machine.role().cta.program_id[axis],
        num_programs=lambda axis: machine.role().cta.launch.grid[axis],
        minimum=_pairwise(torch.fmin, min),  # of a number and NaN the number, as on the hardware
        maximum=_pairwise(torch.fmax, max),
        zeros=lambda shape, dtype, layout=None: tile(torch.zeros(shape, dtype=dtype)),
        full=lambda shape, value, dtype, layout=None: tile(torch.full(shape, value, dtype=dtype)),
        arange=lambda start, end, layout=None: tile(torch.arange(start, end, dtype=torch.int32)),
        max=_max,
        sum=_sum,
        exp2=torch.exp2,
        erf=torch.erf,
        log2=torch.log2,
        where=where,
        multiple_of=lambda x, values: x,
        max_contiguous=lambda x, values: x,
        expand_dims=lambda x, axis: x.unsqueeze(axis),
        join=lambda a, b: tile(torch.stack([a, b], -1)),
        convert_layout=lambda x, layout, assert_trivial=False: x,
        map_elementwise=map_elementwise,
        inline_asm_elementwise=inline_asm,
        allocate_shared_memory=machine.allocate_shared_memory,
        warp_specialize=machine.warp_specialize,
        load=machine.load,
        store=machine.store,
        atomic_add=machine.atomic_add,
        atomic_xchg=machine.atomic_xchg,
        thread_barrier=machine.thread_barrier,
    )
    tma = _module(
        "tma",
        async_load=machine.tma_load,
        async_store=machine.tma_store,
        store_wait=machine.tma_store_wait,
    )
    mbarrier = _module(
        "mbarrier",
        MBarrierLayout=MBarrierLayout,
        init=lambda barrier, count: barrier.init(count),
        wait=machine.mbarrier_wait,
        expect=machine.mbarrier_expect,
        arrive=machine.mbarrier_arrive,
    )
    hopper = _module(
        "triton.experimental.gluon.language.nvidia.hopper",
        tma=tma,
        mbarrier=mbarrier,
        warpgroup_mma=machine.warpgroup_mma,
        warpgroup_mma_wait=machine.warpgroup_mma_wait,
        fence_async_shared=machine.fence_async_shared,
    )
    async_copy = _module(
        "async_copy",
        async_copy_global_to_shared=copies.start,
        commit_group=copies.commit,
        mbarrier_arrive=machine.mbarrier_arrive_by_threads,
        wait_group=copies.wait,
    )
    ampere = _module(
        "triton.experimental.gluon.language.nvidia.ampere", mma_v2=_product, async_copy=async_copy
    )
    gluon = _module(
        "triton.experimental.gluon",
        jit=jit,
        constexpr_function=lambda function: function,
        aggregate=lambda cls: cls,
        language=gl,
    )
    prefix = "triton.experimental.gluon"
    return {
        "triton": _module(
            "triton",
            __version__="3.6.0",
            cdiv=lambda a, b: -(-a // b),
            knobs=SimpleNamespace(runtime=SimpleNamespace(debug=False)),
        ),
        "triton.experimental": _module("triton.experimental", gluon=gluon),
        prefix: gluon,
        f"{prefix}._runtime": _module(f"{prefix}._runtime", GluonASTSource=None),
        f"{prefix}.language": gl,
        f"{prefix}.language._core": _module(f"{prefix}.language._core", builtin=_builtin),
        f"{prefix}.language.nvidia": _module(f"{prefix}.language.nvidia", hopper=hopper),
        f"{prefix}.language.nvidia.ampere": ampere,
        f"{prefix}.language.nvidia.hopper": hopper,
        f"{prefix}.nvidia": _module(f"{prefix}.nvidia"),
        f"{prefix}.nvidia.hopper": _module(f"{prefix}.nvidia.hopper", TensorDescriptor=Descriptor),
    }


def _builtin(function: Any) -> Any:
    """What stands for a function of ours that makes Triton's operations."""
    return {"specialize_evenly": machine.specialize_evenly}[function.__name__]


def _static_assert(condition: bool, message: str = "") -> None:
    if not condition:
        raise SimulationError(f"static_assert: {message}")
