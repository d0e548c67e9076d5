"""How an operator is declared, how a kernel is chosen for it, and how it becomes a torch op."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import cache, lru_cache
from importlib import import_module
from typing import Any

import torch

from rooftile.kernels import Kernel

LIBRARY = torch.library.Library("rooftile", "DEF")
GPU_FAMILIES = ("triton", "gluon")
# What os.environ looks into, which answers ten times as fast where a name is not set.
_ENVIRONMENT: Mapping[Any, Any] = getattr(os.environ, "_data", os.environ)
_ENCODED = _ENVIRONMENT is not os.environ and os.name == "posix"
_CHECK: Any = b"ROOFTILE_CHECK" if _ENCODED else "ROOFTILE_CHECK"
_CHECKS = {b"1": True, b"0": False, b"": False} if _ENCODED else {"1": True, "0": False, "": False}
OPERATORS: dict[str, Operator] = {}  # every declared operator, for `rooftile doctor`


class Operator:
    """A private torch operator `rooftile::<name>` with several kernels behind it.

    schema: its arguments and results in torch's schema language, without the trailing
        `str kernel` argument, which is added here.
    module: the file, the same in each family, whose `KERNELS[name]` implements it.
    call: builds from the private arguments the hashable static properties that choose a kernel.
    fake: computes result metadata from the private arguments (for torch.compile).
    refused: families that have no kernel for it although its kin has one, and the reason.
    """

    def __init__(
        self,
        name: str,
        schema: str,
        *,
        module: str,
        families: Iterable[str],
        call: Callable[..., Hashable],
        fake: Callable[..., Any],
        refused: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.module = module
        self.families = tuple(families)
        self.refused = refused or {}
        self._call = call
        arguments, results = schema.split("->")
        LIBRARY.define(f"{name}{arguments.rstrip().removesuffix(')')}, str kernel) ->{results}")
        LIBRARY.impl(name, self._run, "CompositeExplicitAutograd")
        torch.library.register_fake(
            f"rooftile::{name}", lambda *args: fake(*args[:-1]), lib=LIBRARY
        )
        self.overload = getattr(torch.ops.rooftile, name).default
        OPERATORS[name] = self

    def handle(self, *arguments: Any) -> Any:
        """Takes the private arguments, unchecked but for the name of a kernel; the engine, which
        validates once a step, calls it.
        """
        self.check_kernel(arguments[-1])
        return self.overload(*arguments)

    def check_kernel(self, requested: Any) -> None:
        """Whether it names one, for this call or another."""
        if isinstance(requested, str) and requested in ("auto", *self.families, *self.refused):
            return
        raise ValueError(
            f"{self.name}: kernel={requested!r:.80} does not exist; "
            f"choose 'auto' or one of {', '.join(map(repr, self.families))}"
        )

    def register_autograd(
        self, backward: Callable[..., Any], setup_context: Callable[..., None]
    ) -> None:
        torch.library.register_autograd(
            f"rooftile::{self.name}",
            lambda *args: exactly(backward, *args),
            setup_context=setup_context,
            lib=LIBRARY,
        )

    def record_kernels(self) -> Operator:
        """Let autograd record what the kernels do, for operators whose kernels are all PyTorch's
        operations: so a backward has derivatives of its own.
        """
        LIBRARY.impl(self.name, torch.library.fallthrough_kernel, "Autograd")
        return self

    def kernel(self, family: str) -> Kernel | str:
        """The kernel of a family, or the reason why this machine does not have it."""
        return _load(self.name, self.module, family)

    def choose(self, call: Hashable, requested: str = "auto") -> str:
        """The family that runs `call`; an explicit request never falls back, it raises."""
        self.check_kernel(requested)
        return _choose(self.name, call, requested)

    def call(self, *arguments: Any) -> Any:
        """The static properties of `handle(*arguments, kernel)`, which choose a kernel."""
        return self._call(*arguments)

    def bind(
        self,
        tensors: tuple[Any, ...],
        rest: tuple[Any, ...],
        requested: str,
        join: Callable[..., tuple[Any, ...]] = operator.add,
        results: int | None = None,  # that the caller reads, None: all
    ) -> Callable[..., Any]:
        """A function of tensors alone that runs what `handle(*join(tensors, rest), requested)` would.

        For tensors of the same shapes, strides, dtypes and devices, and without torch's dispatcher.
        """
        arguments = join(tensors, rest)
        family = _choose(self.name, self._call(*arguments), requested)
        kernel = _load(self.name, self.module, family)
        assert isinstance(kernel, Kernel)
        if kernel.bind is not None:
            return kernel.bind(*arguments, **({} if results is None else {"results": results}))
        run = kernel.run
        if family in GPU_FAMILIES:
            return lambda *tensors: run(*join(tuple(_gapless([*tensors])), rest))
        return lambda *tensors: run(*join(tensors, rest))

    def refusal(self, call: Hashable, family: str) -> str | None:
        """Why `family` cannot run `call`, or `None`."""
        device = getattr(call, "device", None)
        if family in GPU_FAMILIES and device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            # Without importing it: Triton takes longer to load than a small model.
            return f"it needs a GPU, not a {device}"
        kernel = self.kernel(family)
        return kernel if isinstance(kernel, str) else kernel.supports(call)

    def _run(self, *args: Any) -> Any:
        *arguments, requested = args
        family = _choose(self.name, self._call(*arguments), requested)
        kernel = _load(self.name, self.module, family)
        assert isinstance(kernel, Kernel)
        if family in GPU_FAMILIES:
            _gapless(arguments)
        return exactly(kernel.run, *arguments)


def _gapless(arguments: list[Any]) -> list[Any]:
    """With lengths, positions, slots and the like as GPU kernels read them: without a stride."""
    for index, argument in enumerate(arguments):
        if (
            isinstance(argument, torch.Tensor)
            and argument.ndim == 1
            and not argument.is_contiguous()
        ):
            arguments[index] = argument.contiguous()
    return arguments


def exactly(run: Callable[..., Any], *arguments: Any) -> Any:
    """run(*arguments) without autocast, which would round the products inside of `run` and change the
    dtype of its results.
    """
    if torch.compiler.is_dynamo_compiling():  # it knows only this way
        with torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
            return run(*arguments)
    if not torch._C._is_any_autocast_enabled():
        return run(*arguments)
    with torch._C._DisableAutocast():
        return run(*arguments)


@cache
def _load(name: str, module: str, family: str) -> Kernel | str:
    try:
        kernels = import_module(f"rooftile.kernels.{family}.{module}").KERNELS
    except ModuleNotFoundError as error:
        return f"module {error.name!r} is not installed"
    return kernels[name]


@lru_cache(maxsize=4096)
def _choose(name: str, call: Hashable, requested: str) -> str:
    declared = OPERATORS[name]
    if requested != "auto":
        declared.check_kernel(requested)
        if requested in declared.refused:
            raise NotImplementedError(
                f"{name}: kernel={requested!r} cannot run this call: {declared.refused[requested]}"
            )
        reason = declared.refusal(call, requested)
        if reason is not None:
            raise NotImplementedError(
                f"{name}: kernel={requested!r} cannot run this call: {reason}; "
                f"use kernel='auto' or change the call"
            )
        return requested
    able = [f for f in declared.families if declared.refusal(call, f) is None]
    if not able:
        reasons = "; ".join(f"{f}: {declared.refusal(call, f)}" for f in declared.families)
        raise NotImplementedError(f"{name}: no kernel can run this call ({reasons})")
    return max(
        able,
        key=lambda family: _load(name, declared.module, family).efficiency_of(call),  # type: ignore[union-attr]
    )


def contents_checked(tensor: torch.Tensor) -> bool:
    """Whether to check the *contents* of tensors like this one (lengths, tables, ids).

    On a CPU that is free of synchronisation and always done outside torch.compile; on a GPU it
    would wait for the device, so only with ROOFTILE_CHECK=1.

    Raises:
        ValueError: another value of ROOFTILE_CHECK than 0 and 1; empty is as if it were not set.
    """
    if torch.compiler.is_compiling():
        return False
    if tensor.device.type == "cpu":
        return True
    value = _ENVIRONMENT.get(_CHECK)
    if value is None:
        return False
    if value not in _CHECKS:
        raise ValueError(f"ROOFTILE_CHECK is {os.environ['ROOFTILE_CHECK']!r}; choose one of 0, 1")
    return _CHECKS[value]
