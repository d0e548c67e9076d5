"""The native library: found beside this file, in the user's cache, or compiled into it."""

from __future__ import annotations

import ctypes
import fcntl
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from ctypes import c_char_p, c_float, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path

from rooftile.kernels.cpu.compile import compile_library, find_compiler, library_name

# Of functions: pointers, 64-bit and 32-bit integers, floats, by letter.
KINDS = {"p": c_void_p, "l": c_int64, "i": c_int32, "f": c_float}
SIGNATURES = {
    "choose": "i",
    "linear": "plilppii",
    "pack": "pilplli",
    "pack_blocks": "iplpplli",
    "embed": "pplp",
    "attention": "pi",
    "append": "pllpllpppppiiliiiiii",
    "rms_norm": "plplpffllppii",
    "gated": "plllipii",
    "rotary": "pllppiiiliipii",
    "step": "ppi",
    "sample": "pi",
}
LEVEL_NAMES = ("portable", "avx2", "avx512", "avx512_vnni", "avx512_bf16")


@cache
def load() -> ctypes.CDLL | str:
    """The library, or the reason why this machine does not have it.

    Raises:
        ValueError: a switch has a value that it does not know.
    """
    chosen = _level()
    if _switch("ROOFTILE_CPU_KERNELS", ("0", "1"), "1") == "0":
        return "the native CPU kernels are switched off by ROOFTILE_CPU_KERNELS=0"
    if sys.byteorder != "little":
        return "the native CPU kernels need a little-endian machine"
    path = _find()
    if isinstance(path, str):
        return path
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return f"the native CPU kernels cannot be loaded: {error}"
    _declare(library)
    library.rooftile_choose(chosen)
    return library


def native() -> ctypes.CDLL:
    """The library.

    Raises:
        NotImplementedError: this machine does not have it; says why.
    """
    library = load()
    if isinstance(library, str):
        raise NotImplementedError(library)
    return library


def refusal() -> str | None:
    """Why there are no native kernels here, or `None`."""
    library = load()
    return library if isinstance(library, str) else None


@cache
def level() -> str:
    """The instructions in use, such as "avx512_bf16"."""
    library = load()
    return "none" if isinstance(library, str) else library.rooftile_choose(_level()).decode()


@contextmanager
def at_level(name: str) -> Iterator[str]:
    """The library with the kernels of the instructions `name`, or of the best that this machine has;
    gives their name. For measurements and tests: weights that were packed before stay valid.
    """
    library = native()
    try:
        yield library.rooftile_choose(LEVEL_NAMES.index(name)).decode()
    finally:
        library.rooftile_choose(_level())


def _declare(library: ctypes.CDLL) -> None:
    """Argument types of every function, so that Python numbers pass without wrapping."""
    for name, kinds in SIGNATURES.items():
        function = getattr(library, f"rooftile_{name}")
        function.argtypes = [KINDS[kind] for kind in kinds]
        function.restype = c_char_p if name == "choose" else None


def _level() -> int:
    """ROOFTILE_CPU_LEVEL lowers the instructions used, to measure or to test older machines."""
    return LEVEL_NAMES.index(_switch("ROOFTILE_CPU_LEVEL", LEVEL_NAMES, LEVEL_NAMES[-1]))


def _switch(name: str, values: Sequence[str], default: str) -> str:
    """What the environment says; empty is as if it were not there."""
    value = os.environ.get(name) or default
    if value not in values:
        raise ValueError(f"{name} is {value!r}; choose one of {', '.join(values)}")
    return value


def _find() -> Path | str:
    name = library_name()
    cached = _cache_directory() / name
    for path in (Path(__file__).parent / name, cached):
        if path.is_file():
            return path
    compiler = find_compiler()
    if compiler is None:
        return (
            "the native CPU kernels are not compiled and there is no C++ compiler; install g++ or "
            "clang++ (they are compiled on next use), or set CXX"
        )
    try:
        with _alone(cached):
            if not cached.is_file():  # another process may just have made it
                print("rooftile: compiling the CPU kernels, once ...", file=sys.stderr, flush=True)
                compile_library(cached, compiler)
    except (RuntimeError, OSError) as error:
        reason = f"the native CPU kernels do not compile: {error}"
        print(
            f"rooftile: {reason}; PyTorch's serve, slower (ROOFTILE_CACHE names another folder)",
            file=sys.stderr,
            flush=True,
        )
        return reason
    return cached


@contextmanager
def _alone(target: Path) -> Iterator[None]:
    """Within, no other process or thread that asks makes `target`; it takes half a minute.

    Raises:
        OSError: there can be nothing beside `target`.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.with_suffix(".lock").open("w") as file:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _cache_directory() -> Path:
    root = os.environ.get("ROOFTILE_CACHE") or os.environ.get("XDG_CACHE_HOME")
    return Path(root or Path.home() / ".cache") / "rooftile"
