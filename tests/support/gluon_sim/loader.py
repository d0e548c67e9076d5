"""Imports kernel modules a second time, against the simulator's stand-ins for Triton."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

from tests.support.gluon_sim import language

_OURS = ("rooftile.kernels.gluon", "rooftile.kernels.triton_version")
_RINGS = (  # file, class, shared tiles of a stage
    ("ring", "Ring", ("buffers",)),
    ("operands", "OperandRing", ("a_tiles", "b_tiles")),
)
_cache: dict[str, ModuleType] = {}
_simulated: dict[str, ModuleType] = {}


def load_simulated(*names: str) -> Any:
    """The modules of these names as the simulator runs them (one: the module itself).

    The real modules, imported before or after, are untouched.
    """
    missing = [name for name in names if name not in _cache]
    if missing:
        _import(missing)
    loaded = tuple(_cache[name] for name in names)
    return loaded[0] if len(loaded) == 1 else loaded


def _import(names: list[str]) -> None:
    kernels = importlib.import_module("rooftile.kernels")
    attributes = {
        n: getattr(kernels, n) for n in ("gluon", "triton_version") if hasattr(kernels, n)
    }
    # Of the modules asked for: those that are not ours, such as the tutorials' examples.
    ours = {n: m for n, m in sys.modules.items() if n.startswith(_OURS) or n in names}
    triton = {n: m for n, m in sys.modules.items() if n == "triton" or n.startswith("triton.")}
    for name in (*ours, *triton):
        del sys.modules[name]
    sys.modules.update(language.modules())
    sys.modules.update(_simulated)  # modules of an earlier call are shared with this one
    try:
        for name in names:
            _cache[name] = importlib.import_module(name)
        for file, ring, tiles in _RINGS:
            module = importlib.import_module(f"rooftile.kernels.gluon.tile.{file}")
            _poison_released_stages(getattr(module, ring), tiles)
        _simulated.update({n: m for n, m in sys.modules.items() if n.startswith(_OURS)})
    finally:
        for name in [n for n in sys.modules if n.startswith((*_OURS, "triton")) or n in names]:
            if name == "triton" or name.startswith(("triton.", *_OURS)) or name in names:
                del sys.modules[name]
        for name in names:  # `from package import module` reads the attribute
            package, _, module = name.rpartition(".")
            if package in sys.modules and hasattr(sys.modules[package], module):
                if name in ours:
                    setattr(sys.modules[package], module, ours[name])
                else:
                    delattr(sys.modules[package], module)
        sys.modules.update(ours)
        sys.modules.update(triton)
        for name in ("gluon", "triton_version"):
            if name in attributes:
                setattr(kernels, name, attributes[name])
            elif hasattr(kernels, name):
                delattr(kernels, name)


def _stage(tiles: Any, i: int, ring: Any) -> Any:
    """Stage i of a ring's tiles, of which there may be several in a stage."""
    stages = len(ring.empty.barriers)
    each = tiles.shape[0] // stages
    return tiles.index(i) if each == 1 else tiles.slice(i * each, each)


def _poison_released_stages(ring: Any, tiles: tuple[str, ...]) -> None:
    """Makes the tiles of a stage NaN the moment its last consumer has released it."""
    original = ring.__init__
    if getattr(original, "poisons", False):
        return

    def init(self: Any, *fields: Any) -> None:
        original(self, *fields)
        for i, barrier in enumerate(self.empty.barriers):
            barrier.guards = tuple(_stage(getattr(self, name), i, self) for name in tiles)

    init.poisons = True  # type: ignore[attr-defined]
    ring.__init__ = init
