"""Compiles `native/` into one shared library: while a wheel is built, or on first use.

It imports nothing of Rooftile, so that the build hook can load it by its path.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).parent / "native"
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-pthread", "-w")
LEVELS = 5  # of instructions: see native/level.cpp


def library_name() -> str:
    """The file's name says what it was made from, so that an outdated one is not found."""
    digest = hashlib.sha256(" ".join((*FLAGS, platform.machine())).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode())
        digest.update(source.read_bytes())
    return f"librooftile_cpu_{digest.hexdigest()[:16]}.so"


def find_compiler() -> list[str] | None:
    """The command of a C++ compiler: $CXX, or the first of the usual names that is there."""
    given = os.environ.get("CXX")
    if given:
        return shlex.split(given)
    for name in ("g++", "clang++", "c++"):
        if shutil.which(name):
            return [name]
    return None


def units() -> list[tuple[str, list[str]]]:
    """Source file and extra flags of each object."""
    levels = range(LEVELS) if platform.machine() in ("x86_64", "AMD64") else range(1)
    plain: list[tuple[str, list[str]]] = [("pool.cpp", []), ("blocks.cpp", []), ("api.cpp", [])]
    # The slowest first.
    return [("level.cpp", [f"-DROOFTILE_LEVEL={level}"]) for level in reversed(levels)] + plain


def compile_library(target: Path, compiler: list[str], workers: int | None = None) -> None:
    """Write the library to `target`, whole or not at all.

    Raises:
        RuntimeError: the compiler failed; with what it said.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as directory:
        objects = []

        def build(index: int, source: str, extra: list[str]) -> str:
            output = str(Path(directory) / f"{index}.o")
            _run([*compiler, *FLAGS, *extra, "-c", str(SOURCES / source), "-o", output])
            return output

        with ThreadPoolExecutor(workers or len(os.sched_getaffinity(0))) as pool:
            jobs = [pool.submit(build, i, *unit) for i, unit in enumerate(units())]
            objects = [job.result() for job in jobs]
        linked = Path(directory) / target.name
        _run([*compiler, "-shared", "-pthread", *objects, "-o", str(linked)])
        linked.replace(target)  # atomic, so a process that compiles at the same time does no harm


def _run(command: list[str]) -> None:
    try:
        result = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise RuntimeError(f"{command[0]} cannot be run: {error}") from None
    if result.returncode:
        raise RuntimeError(f"{' '.join(command[:1])} failed: {result.stderr.strip()[-2000:]}")
