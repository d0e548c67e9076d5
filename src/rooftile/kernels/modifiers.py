"""Functions that change attention scores or visibility: registered once, named by their source.

An operator's arguments are tensors, numbers and strings, so a modifier travels as its key; kernels
look the functions up here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType
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

    It is compared as byte code, which is there at an interpreter's prompt too.
    """
    source = "" if fn is None else str(getattr(fn, "cache_key", None) or fn.fn.__code__.co_code)
    text = f"{kind}\n{source}\n{_instructions(reference.__code__)}\n{reference.__defaults__}"
    key = f"{reference.__name__}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    FUNCTIONS[key] = Functions(fn, reference)
    return Modifier(kind, key)


def _instructions(code: CodeType) -> str:
    constants = [_instructions(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts]
    return f"{code.co_code.hex()} {constants} {code.co_names} {code.co_varnames}"


def functions(key: str) -> Functions | None:
    """The functions behind a key, None for the empty key, which means no modifier."""
    return FUNCTIONS[key] if key else None
