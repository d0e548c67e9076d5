"""Calling a kernel without torch's dispatcher, where nobody would notice the difference.

Going through the dispatcher and an operator's autograd rule costs tens of microseconds of Python,
several times what a launch does.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad, profiler


def undispatched(*tensors: Tensor) -> bool:
    """Whether a kernel may be called on these tensors directly.

    Not while something records or transforms operators (compilation, tracing, torch_dispatch modes,
    functorch, forward-mode derivatives, the profiler, autocast), not for subclasses, what is no tensor,
    one without data or one whose sign torch has yet to turn, and not where a gradient is wanted.
    """
    if (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._is_tracing()
        or torch._C._is_any_autocast_enabled()
        or forward_ad._current_level >= 0
        or profiler._is_profiler_enabled
    ):
        return False
    gradients = torch.is_grad_enabled()
    for tensor in tensors:
        if type(tensor) is not Tensor and type(tensor) is not torch.nn.Parameter:
            return False
        if tensor.is_meta or tensor.is_neg() or (gradients and tensor.requires_grad):
            return False
    return True


class CheckedCalls:
    """Functions that run calls which passed the checks, by the kind of call.

    A kind is all that the checks, the choice of a kernel and what it prepares look at.
    """

    MOST = 1024

    def __init__(self) -> None:
        self._found: dict[Hashable, Callable[..., Any]] = {}

    def get(self, kind: Any) -> Callable[..., Any] | None:
        try:
            return self._found.get(kind)
        except TypeError:  # a list, say, among the options: for the checks to judge
            return None

    def add(self, kind: Any, run: Callable[..., Any]) -> None:
        try:
            hash(kind)
        except TypeError:
            return
        if len(self._found) >= self.MOST:
            self._found.clear()
        self._found[kind] = run
