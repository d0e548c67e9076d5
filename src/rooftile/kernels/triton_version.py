"""Every name that differs between Triton versions, in one place.

Machine code is checked on Triton 3.6; newer versions rename what is chosen here. Importing this
module needs Triton, not a GPU.
"""

from collections.abc import Callable
from typing import Any

import triton
from triton.experimental import gluon
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

__all__ = [
    "TRITON_VERSION",
    "GluonASTSource",
    "TensorDescriptor",
    "aggregate",
    "relaunch",
    "tma_load",
    "tma_store",
    "tma_store_wait",
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
# Waits until at most n stores of this thread still have to read their shared memory.
tma_store_wait = tma.store_wait


def relaunch(compiled: Any, ctas: int, arguments: tuple[Any, ...]) -> None:
    """Launches what an earlier `kernel[grid](...)` returned, with all its arguments in order."""
    driver = triton.runtime.driver.active
    stream = driver.get_current_stream(driver.get_current_device())
    hooks = triton.knobs.runtime
    compiled.run(
        *(ctas, 1, 1, stream, compiled.function, compiled.packed_metadata, None),
        *(hooks.launch_enter_hook, hooks.launch_exit_hook),
        *arguments,
    )
