"""Every name that differs between Triton versions, in one place.

Machine code is checked on Triton 3.6; newer versions rename what is chosen here. Importing this
module needs Triton, not a GPU.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from threading import Lock
from typing import Any

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from rooftile.kernels.one_copy import merged, refuse_memory

__all__ = [
    "ANY_GROUP",
    "TRITON_VERSION",
    "BareKernel",
    "GluonASTSource",
    "TensorDescriptor",
    "aggregate",
    "bare_kernel",
    "little_llvm",
    "relaunch",
    "specialize",
    "tma_load",
    "tma_store",
    "tma_store_wait",
    "translate_sooner",
]

TRITON_VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])


def _first(module: Any, *names: str) -> Callable[..., Any]:
    """The first of several names that this version has, newest spelling first."""
    for name in names:
        if hasattr(module, name):
            return getattr(module, name)
    raise ImportError(
        f"Triton {triton.__version__} has none of {', '.join(names)}; use Triton 3.6 to 3.9"
    )


# A class whose instances bundle device values, with jitted methods (a struct of the kernel language).
aggregate: Any = gluon.aggregate if hasattr(gluon, "aggregate") else triton.language.core._aggregate
# Bulk tensor copies: (descriptor, coordinates, barrier, shared) and (descriptor, coordinates, shared).
tma_load = _first(tma, "async_load", "async_copy_global_to_shared")
tma_store = _first(tma, "async_store", "async_copy_shared_to_global")
# Kernels say Triton 3.6's names for these two, which newer versions have under others.
if not hasattr(gl, "thread_barrier"):
    gl.thread_barrier = gl.barrier
if not hasattr(gl.shared_memory_descriptor, "_reinterpret"):
    gl.shared_memory_descriptor._reinterpret = gl.shared_memory_descriptor.reinterpret
# Waits until at most n stores of this thread still have to read their shared memory.
tma_store_wait = tma.store_wait


def _is_built_in(specialize: Any) -> bool:
    """Whether this is Triton's, not the simulator's."""
    return "_generator" in inspect.signature(specialize).parameters


def _with_shared_functions(specialize: Any) -> Any:
    """`gl.warp_specialize`, whose default role shares what it calls with workers of as many warps.

    Triton translates a function once for each number of warps, which it knows of workers only: what the
    default role calls was translated again for them, a quarter of a kernel's translation.
    """
    if not _is_built_in(specialize):
        return specialize
    from triton.experimental.gluon.language._semantic import GluonCallerContext

    @wraps(specialize)  # Triton's mark of what is built in comes along
    def warp_specialize(
        functions_and_args: Any,
        worker_num_warps: Any,
        worker_num_regs: Any,
        _semantic: Any = None,
        _generator: Any = None,
    ) -> Any:
        before = _generator.caller_context
        warps = _generator.builder.options.num_warps
        _generator.caller_context = before or GluonCallerContext(num_warps=warps)
        result = specialize(
            *(functions_and_args, worker_num_warps, worker_num_regs),
            _semantic=_semantic,
            _generator=_generator,
        )
        _generator.caller_context = before
        return result

    return warp_specialize


_warp_specialize = _with_shared_functions(gl.warp_specialize)


@gluon.jit
def _idle():  # type: ignore[no-untyped-def]
    """A role with nothing to do."""


def _with_one_copy(specialize: Any) -> Any:
    """`specialize` as kernels call it, on this version's `gl.warp_specialize`; see gluon/tile/roles.py."""
    in_triton = _is_built_in(specialize)

    def with_consumers(
        consumer: Any,
        arguments: Any,
        groups: Any,
        registers: Any,
        others: Any,
        other_registers: Any,
        one_copy: Any = True,
        **of_triton: Any,
    ) -> Any:
        groups, one_copy = (getattr(value, "value", value) for value in (groups, one_copy))

        def numbered(group: int) -> Any:
            return consumer, type(arguments)([*arguments, gl.constexpr(group)])

        roles = [numbered(group) for group in range(groups)]
        if in_triton and TRITON_VERSION == (3, 6) and one_copy and groups > 1:
            _let_consumers_share()
            nothing = (_idle, gl.tuple([]))
            roles = [nothing, numbered(ANY_GROUP), *[nothing] * (groups - 2)]
        warps = [4] * (groups - 1) + [1] * len(others)
        budgets = [registers] * (groups - 1) + [other_registers] * len(others)
        return specialize([*roles, *others], warps, budgets, **of_triton)

    if not in_triton:
        return with_consumers

    @wraps(specialize)
    def built_in(*arguments: Any, _semantic: Any = None, _generator: Any = None) -> Any:
        return with_consumers(*arguments, _semantic=_semantic, _generator=_generator)

    return built_in


ANY_GROUP = -1  # a consumer's number where its code is that of all
specialize = _with_one_copy(_warp_specialize)

_little: ContextVar[bool] = ContextVar("_little", default=False)
_once = Lock()
_shared = False  # whether what Triton makes passes through one_copy.py


class _Llvm:
    """What Triton's compiler knows as `llvm`: its highest level is the lowest inside `little_llvm`."""

    def __init__(self, llvm: Any) -> None:
        self._llvm = llvm

    def __getattr__(self, name: str) -> Any:
        if name == "OPTIMIZE_O3" and _little.get():
            name = "OPTIMIZE_O0"
        return getattr(self._llvm, name)


def _told_apart(backend_hash: Callable[[Any], str]) -> Callable[[Any], str]:
    """A backend's part of the keys of Triton's cache, which knows nothing of LLVM's levels."""

    @wraps(backend_hash)
    def told_apart(backend: Any) -> str:
        return backend_hash(backend) + "-little-llvm" * _little.get()

    return told_apart


def _let_llvm_be_spared() -> None:
    from triton.backends.nvidia import compiler

    with _once:
        if not isinstance(compiler.llvm, _Llvm):
            compiler.CUDABackend.hash = _told_apart(compiler.CUDABackend.hash)
            compiler.llvm = _Llvm(compiler.llvm)


def _let_consumers_share() -> None:
    """From here on, what Triton makes of a kernel passes through one_copy.py on its way to machine code."""
    from triton.backends.nvidia import compiler

    global _shared
    with _once:
        if _shared:
            return
        _shared = True
        make = compiler.CUDABackend.make_llir

        @wraps(make)
        def make_llir(backend: Any, module: Any, *others: Any, **named: Any) -> str:
            refuse_memory(module)
            return merged(make(backend, module, *others, **named))

        compiler.CUDABackend.make_llir = make_llir


@contextmanager
def little_llvm() -> Iterator[None]:
    """What this thread compiles inside is not optimised by LLVM, but for what Triton adds at every level
    (structs are taken apart, instructions combined).

    MLIR's passes before it and the code generator and ptxas after it stay as they are. Triton's cache keeps
    what is compiled so apart from what is not. Other versions than Triton 3.6 compile as always.
    """
    if TRITON_VERSION == (3, 6):
        _let_llvm_be_spared()
    token = _little.set(True)
    try:
        yield
    finally:
        _little.reset(token)


class _But:
    """A module, but for names that something quicker stands for."""

    def __init__(self, module: Any, **instead: Any) -> None:
        self.__dict__.update(instead, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def translate_sooner() -> None:
    """Takes a quarter of the time from Triton's translation of functions, which makes the same of them.

    For every node it visits, it silences warnings that Python stopped giving long ago; and every value made of
    others, such as a shape, spells out a name for its type, which errors alone show. Other versions than
    Triton 3.6 translate as always.
    """
    if TRITON_VERSION != (3, 6):
        return
    from triton.compiler import code_generator
    from triton.language.core import tuple_type

    def __init__(self: Any, types: Any, fields: Any = None) -> None:
        self.types = types
        self.fields = fields or [""] * len(types)

    def name(self: Any) -> str:
        named = zip(self.fields, self.types, strict=True)
        return "[" + ",".join(f"{field}:{kind}" for field, kind in named) + "]"

    with _once:
        if not isinstance(code_generator.warnings, _But):
            tuple_type.__init__ = __init__
            tuple_type.name = property(name)
            code_generator.warnings = _But(
                code_generator.warnings, catch_warnings=nullcontext, simplefilter=lambda *_: None
            )


def relaunch(compiled: Any, ctas: int, arguments: tuple[Any, ...], cluster: int = 1) -> None:
    """Launches what an earlier `kernel[grid](...)` returned, with all its arguments in order."""
    driver = triton.runtime.driver.active
    stream = driver.get_current_stream(driver.get_current_device())
    hooks = triton.knobs.runtime
    compiled.run(
        *(ctas // cluster, 1, 1, stream, compiled.function, _metadata(compiled, cluster), None),
        *(hooks.launch_enter_hook, hooks.launch_exit_hook),
        *arguments,
    )


def _metadata(compiled: Any, cluster: int) -> Any:
    """What the launcher is told: warps, CTAs of a cluster (by which it multiplies the grid), memory."""
    if cluster == 1:
        return compiled.packed_metadata
    warps, _, *rest = compiled.packed_metadata
    return (warps, cluster, *rest)


@dataclass(frozen=True)
class BareKernel:
    """A compiled kernel's launcher without what Triton wraps around it."""

    # Takes the grid and the stream, `handles`, map, shape and strides of each descriptor, addresses,
    # numbers and constants.
    launch: Callable[..., None]
    current_stream: Callable[[int], int]
    fill_tensor_map: Callable[..., Any]
    # Function, cooperative, dependent, two kinds of scratch memory, metadata, three hooks' places.
    handles: tuple[Any, ...]
    tensor_maps: tuple[dict[str, Any], ...]

    def tensor_map(
        self,
        i: int,
        address: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        copied: tuple[int, ...] | None = None,
    ) -> Any:
        """The encoded map of descriptor argument i; copied: another box than the kernel's."""
        meta = self.tensor_maps[i]
        block = meta["block_size"] if copied is None else list(copied)
        return self.fill_tensor_map(
            *(address, meta["swizzle"], meta["elem_size"], meta["elem_type"]),
            *(block, list(shape), list(strides), 0),
        )


def bare_kernel(compiled: Any, cluster: int = 1) -> BareKernel | None:
    """The launcher under Triton 3.6's, or `None` where this version has another one."""
    runner = compiled.run
    if TRITON_VERSION != (3, 6) or runner.global_scratch_size or runner.profile_scratch_size:
        return None
    inner = runner.launch
    maps: tuple[Any, ...] = ()
    if inspect.isfunction(inner):  # the wrapper that encodes tensor maps for each call
        closure = inspect.getclosurevars(inner).nonlocals
        inner, maps = closure["launcher"], tuple(closure["tensordesc_meta"])
    if not all(maps):
        return None
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    driver = triton.runtime.driver.active
    return BareKernel(
        inner,
        driver.get_current_stream,
        driver.utils.fill_tma_descriptor,
        (
            *(compiled.function, runner.launch_cooperative_grid, runner.launch_pdl, None, None),
            *(_metadata(compiled, cluster), None, None, None),
        ),
        tuple({**m, "elem_type": TMA_DTYPE_DEVICE_TO_HOST[m["elem_type"]]} for m in maps),
    )
