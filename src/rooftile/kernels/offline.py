"""Building Triton and Gluon kernels on a machine without a GPU, into a cache that can be carried.

    with offline("sm_90a", directory) as built:
        attention(q, k, v, None, -1, 0, 0.0, 0.1)   # the kernel's host code, on CPU tensors
    print(built)                                    # what was compiled, and how long it took

Inside, launching a kernel compiles it for the target exactly as the first call on such a GPU would,
and runs nothing. Triton keys its cache by source, argument types, target and its own build, and here by
whether LLVM was spared (gluon/first_call.py), so the files serve a machine with the same Triton under
the same Python version (TRITON_CACHE_DIR).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch


@dataclass(frozen=True)
class Target:
    """capability: compute capability; units: streaming multiprocessors, which host code asks for."""

    name: str
    capability: tuple[int, int]
    units: int


TARGETS = {
    target.name: target
    for target in (
        Target("sm_80", (8, 0), 108),
        Target("sm_89", (8, 9), 128),
        Target("sm_90a", (9, 0), 132),
        Target("sm_100a", (10, 0), 148),
    )
}


@dataclass(frozen=True)
class Built:
    """One compiled kernel; found: it was in the cache already."""

    kernel: str
    seconds: float
    found: bool


_target: Target | None = None


def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of what kernels for tensors on `device` run on; (0, 0) on a plain CPU."""
    if _target is not None:
        return _target.capability
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def building() -> bool:
    """Whether launches compile instead of running."""
    return _target is not None


def target_of(name: str) -> Target:
    """Raises ValueError for a target that is not known."""
    if name not in TARGETS:
        raise ValueError(f"there is no target {name!r}; choose from {', '.join(TARGETS)}")
    return TARGETS[name]


@contextlib.contextmanager
def offline(name: str, directory: Path | None = None) -> Iterator[list[Built]]:
    """Makes launches compile for a target, into `directory` (default: Triton's own cache).

    Raises:
        ValueError: an unknown target.
        ModuleNotFoundError: Triton is not installed.
    """
    global _target
    target = target_of(name)
    try:
        import triton
        from triton.backends.compiler import GPUTarget
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "building kernels needs Triton; install it with: pip install triton==3.6.0"
        ) from error

    built: list[Built] = []
    major, minor = target.capability
    gpu = GPUTarget("cuda", 10 * major + minor, 32)
    place = f"offline {name}"  # a device of its own: nothing that is built here is launched later
    driver = SimpleNamespace(
        get_current_target=lambda: gpu,
        get_current_device=lambda: place,
        get_current_stream=lambda device: 0,
    )
    run = triton.runtime.jit.JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        run(self, *args, grid=grid, warmup=True, **options)

    began = [time.perf_counter()]

    def listen(*, src: Any, metadata: Any, cache_hit: bool, **_: Any) -> None:
        built.append(Built(src.name, time.perf_counter() - began[0], cache_hit))
        began[0] = time.perf_counter()

    properties = SimpleNamespace(multi_processor_count=target.units, major=major, minor=minor)
    active = triton.runtime.driver
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(triton.runtime.jit.JITFunction, "run", compile_only))
        stack.enter_context(mock.patch.object(active, "_active", driver))
        patched = (("get_device_properties", properties), ("get_device_capability", (major, minor)))
        for function, value in patched:
            answer = mock.Mock(return_value=value)
            stack.enter_context(mock.patch.object(torch.cuda, function, answer))
        stack.enter_context(triton.knobs.compilation.scope())
        triton.knobs.compilation.listener = listen
        if directory is not None:
            stack.enter_context(triton.knobs.cache.scope())
            triton.knobs.cache.dir = str(directory)
        before, _target = _target, target
        try:
            yield built
        finally:
            _target = before
