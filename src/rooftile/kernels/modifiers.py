"""Functions that change attention scores or visibility: registered once, named by their source.

An operator's arguments are tensors, numbers and strings, so a modifier travels as its key; kernels
look the functions up here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, Literal

from torch import Tensor

Kind = Literal["score", "mask"]


@dataclass(frozen=True)
class Functions:
    """fn: a `@triton.jit` function, or None; reference: the same in torch, by broadcasting."""

    fn: Any
    reference: Callable[..., Tensor]


FUNCTIONS: dict[str, Functions] = {}


@dataclass(frozen=True, eq=False)
class Modifier:
    """A registered function with the tensors that it captures; made by `score_mod`, `mask_mod`.

    `modifier(bias, slopes)` is the same function with these tensors passed after its indices.
    """

    kind: Kind
    key: str
    tensors: tuple[Tensor, ...] = ()

    def __call__(self, *tensors: Tensor) -> Modifier:
        return Modifier(self.kind, self.key, tensors)


def register(kind: Kind, fn: Any, reference: Callable[..., Tensor]) -> Modifier:
    """The same source gives the same modifier, in every process of one Python version.

    It is compared as byte code, which is there at an interpreter's prompt too, with what its global
    names stand for: the same text means something else in another module.
    """
    source = "" if fn is None else str(getattr(fn, "cache_key", None) or fn.fn.__code__.co_code)
    text = f"{kind}\n{source}\n{_meaning(reference, [])}"
    key = f"{reference.__name__}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    FUNCTIONS[key] = Functions(fn, reference)
    return Modifier(kind, key)


def _meaning(value: Any, known: list[Any]) -> str:
    """What a value stands for, in words that differ for whatever computes something else."""
    if isinstance(value, FunctionType):
        if value in known:  # it calls itself
            return value.__name__
        known.append(value)
        given = (value.__defaults__, value.__kwdefaults__)
        names = sorted(_names(value.__code__) & value.__globals__.keys())
        there = [f"{name}={_meaning(value.__globals__[name], known)}" for name in names]
        return f"{_instructions(value.__code__)}\n{given}\n{there}"
    if isinstance(value, ModuleType):
        return value.__name__
    if isinstance(value, int | float | complex | str | bytes | None):
        return repr(value)
    if isinstance(value, type | BuiltinFunctionType):
        return f"{value.__module__}.{value.__qualname__}"
    return f"{type(value)} {id(value)}"


def _names(code: CodeType) -> set[str]:
    inner = (_names(c) for c in code.co_consts if isinstance(c, CodeType))
    return set(code.co_names).union(*inner)


def _instructions(code: CodeType) -> str:
    constants = [_instructions(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts]
    return f"{code.co_code.hex()} {constants} {code.co_names} {code.co_varnames}"


def functions(key: str) -> Functions | None:
    """The functions behind a key, None for the empty key, which means no modifier."""
    return FUNCTIONS[key] if key else None
