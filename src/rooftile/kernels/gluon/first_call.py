"""A kernel's first call, sooner: less work for Triton's compiler, and work beside it.

    @spares_llvm(where=lambda constants: not constants["has_alibi"])
    @gluon.jit
    def kernel(...): ...

    with sooner(kernel, constants):
        kernel[grid](..., **constants)

Where the seconds of a first call go: docs/performance.md, "first calls".
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import wraps
from threading import Thread
from types import SimpleNamespace
from typing import Any, TypeVar

import triton

from rooftile.kernels.triton_version import TRITON_VERSION, little_llvm, translate_sooner

Kernel = TypeVar("Kernel")
Constants = Mapping[str, Any]  # of a class of calls, by name
# Not by kernel: its hash would read all its sources.
_sparing: list[tuple[Any, Callable[[Constants], bool]]] = []


def spares_llvm(
    where: Callable[[Constants], bool] = lambda _: True,
) -> Callable[[Kernel], Kernel]:
    """Marks a kernel whose machine code is as good without LLVM's optimiser, for classes of calls that say so.

    LLVM takes 0.3 to 1 s of a first call of attention, and what it makes takes ptxas 0.1 to 0.2 s more.
    """

    def mark(kernel: Kernel) -> Kernel:
        _sparing.append((kernel, where))
        return kernel

    return mark


def unchecked() -> dict[str, int]:
    """Options of a kernel whose sums Triton does not check for overflow, unless it was told to (TRITON_DEBUG).

    It works out each sum once more in 64 bits, throws that away where it does not check, and so translates
    many times as many operations: 5% to 15% of the time.
    """
    return {"sanitize_overflow": bool(triton.knobs.runtime.debug)}


def optimised(kernel: Any, constants: Constants) -> AbstractContextManager[None]:
    """Inside, `kernel` is compiled as the first call of a class is."""
    spares = any(kernel is other and where(constants) for other, where in _sparing)
    return little_llvm() if spares else nullcontext()


@contextmanager
def sooner(kernel: Any, constants: Constants) -> Iterator[None]:
    """Inside, what a call of `kernel` compiles takes less time.

    Python's garbage collector pauses: Triton makes objects by the million while it translates a kernel,
    and each of the collections that follow walks all that a process has, for a tenth of a second where
    torch is loaded. And the C code that launches the kernel is built meanwhile, by another thread.
    """
    paused = gc.isenabled()
    gc.disable()
    try:
        if TRITON_VERSION == (3, 6) and hasattr(kernel, "device_caches"):  # not in the simulator
            translate_sooner()
            driver = triton.runtime.driver.active
            kernel.device_caches[driver.get_current_device()]  # sets what it compiles with
            if not hasattr(kernel.compile, "__wrapped__"):
                kernel.compile = _with_launcher_beside(kernel.compile)
        with optimised(kernel, constants):
            yield
    finally:
        if paused:
            gc.enable()


def _with_launcher_beside(compile_: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(compile_)
    def compile_both(src: Any, *args: Any, **options: Any) -> Any:
        launcher = Thread(target=_build_launcher, args=(src,))
        launcher.start()
        try:
            return compile_(src, *args, **options)
        finally:
            launcher.join()

    return compile_both


def _build_launcher(src: Any) -> None:
    """Into Triton's cache, where Triton finds it by its text, which depends on the arguments alone."""
    build = getattr(triton.runtime.driver.active, "launcher_cls", None)
    if build is None:  # nothing is launched, see offline.py
        return
    with suppress(Exception):  # which Triton meets again where it is told to somebody
        descriptors = sum(str(kind).startswith("tensordesc") for kind in src.signature.values())
        build(src, SimpleNamespace(tensordesc_meta=[True] * descriptors, **_NOTHING))


# What else a launcher is told of its kernel.
_NOTHING = {
    "num_ctas": 1,
    "global_scratch_size": 0,
    "global_scratch_align": 1,
    "profile_scratch_size": 0,
    "profile_scratch_align": 1,
    "launch_cooperative_grid": False,
    "launch_pdl": False,
}
