"""Checks shared by the public operators: every error names the value given and the remedy."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.autograd import forward_ad

FLOAT32_MAX = 3.4e38
FLOATS = ("torch.float64", "torch.float32", "torch.bfloat16", "torch.float16")


def require(condition: bool, message: Callable[[], str]) -> None:
    """message: made only where it is needed. Formatting takes longer than checking, and
    torch.compile cannot format a length that it does not know yet.
    """
    if not condition:
        raise ValueError(message())


def check_tensors(operator: str, **tensors: Tensor) -> None:
    """Tensors, none of them left out: before anything reads their shapes."""
    _check_tensors(operator, tensors, required=True)


def check_float(operator: str, **tensors: Tensor | None) -> None:
    _check_tensors(operator, tensors)
    for name, tensor in tensors.items():
        if tensor is not None and str(tensor.dtype) not in FLOATS:
            raise ValueError(
                f"{operator}: {name} has dtype {tensor.dtype}; convert it to one of {', '.join(FLOATS)}"
            )


def check_shape(
    operator: str, name: str, tensor: Tensor, shape: tuple[int, ...], what: str
) -> None:
    """what: the expected shape in words, such as "[hidden]"."""
    _check_tensors(operator, {name: tensor}, required=True)
    if tuple(tensor.shape) != shape:
        raise ValueError(
            f"{operator}: {name} has shape {list(tensor.shape)}; expected {what} = {list(shape)}"
        )


def check_same(operator: str, **tensors: Tensor | None) -> None:
    """Same device and dtype as the first tensor."""
    _check_tensors(operator, tensors)
    (first_name, first), *rest = [(n, t) for n, t in tensors.items() if t is not None]
    for name, tensor in rest:
        if tensor.dtype != first.dtype:
            raise ValueError(
                f"{operator}: {name} is {tensor.dtype} but {first_name} is {first.dtype}; "
                f"convert one of them"
            )
    check_device(operator, **tensors)


def check_device(operator: str, **tensors: Tensor | None) -> None:
    _check_tensors(operator, tensors)
    (first_name, first), *rest = [(n, t) for n, t in tensors.items() if t is not None]
    for name, tensor in rest:
        if tensor.device != first.device:
            raise ValueError(
                f"{operator}: {name} is on {tensor.device} but {first_name} is on {first.device}; "
                f"move one of them"
            )


def check_integers(
    name: str, tensor_name: str, tensor: Tensor, like: Tensor, like_name: str
) -> None:
    """tensor holds int32 or int64 and lies on the device of `like`."""
    check_tensors(name, **{tensor_name: tensor})
    require(
        tensor.dtype in (torch.int32, torch.int64),
        lambda: (
            f"{name}: {tensor_name} has dtype {tensor.dtype}; convert it to torch.int32 or torch.int64"
        ),
    )
    require(
        tensor.device == like.device,
        lambda: (
            f"{name}: {tensor_name} is on {tensor.device} but {like_name} is on {like.device}; "
            f"move one of them"
        ),
    )


def check_flags(operator: str, **flags: bool) -> None:
    for name, flag in flags.items():
        if not isinstance(flag, int):  # a bool is one
            raise ValueError(f"{operator}: {name} is {flag!r:.80}; it must be True or False")


def refuse_gradient(operator: str, remedy: str = "", **tensors: Tensor | None) -> None:
    """Of arguments that have none; torch would drop it with a warning at best."""
    if not torch.is_grad_enabled():
        return
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            raise NotImplementedError(
                f"{operator}: {name} requires a gradient, and it has no backward; "
                f"{remedy}call under torch.no_grad()"
            )


def check_whole(operator: str, least: int, **numbers: int) -> None:
    """Whole numbers that kernels can count with, tracing ones included."""
    for name, number in numbers.items():
        whole = isinstance(number, int | torch.SymInt) or hasattr(number, "__index__")
        if not whole:
            raise ValueError(f"{operator}: {name} is {number!r:.80}; it must be an int")
        require(
            least <= number < 2**31,
            lambda name=name, number=number: (  # type: ignore[misc]
                f"{operator}: {name} is {number}; it must be at least {least} and below 2**31"
            ),
        )


def is_finite(number: float) -> bool:
    """Whether it is a number, and finite in float32. By comparison, which torch.compile traces for
    numbers that it does not know yet. A tensor is none: its gradient would be lost.
    """
    try:
        return not isinstance(number, Tensor) and -FLOAT32_MAX <= number <= FLOAT32_MAX
    except TypeError:
        return False


def _check_tensors(
    operator: str, given: Mapping[str, Tensor | None], required: bool = False
) -> None:
    for name, tensor in given.items():
        if (tensor is not None or required) and not isinstance(tensor, Tensor):
            shown = " ".join(repr(tensor).split())  # an array has lines
            raise ValueError(f"{operator}: {name} is {shown:.80}; it must be a tensor")
        if (
            forward_ad._current_level >= 0
            and tensor is not None
            and forward_ad.unpack_dual(tensor).tangent is not None
        ):
            # torch would drop it without a word.
            raise NotImplementedError(
                f"{operator}: {name} has a tangent, and there are no forward-mode derivatives; use "
                f"backward()"
            )


def check_rotary_table(name: str, cos_sin: Tensor, head_dim: int, at_least: int = 0) -> None:
    """Raises: ValueError for what is no table of `at_least` positions for heads of this size."""
    rows = f" with at least {at_least} positions" if at_least else ""
    require(
        cos_sin.dim() == 3
        and cos_sin.shape[1] == 2
        and 0 < 2 * cos_sin.shape[2] <= head_dim
        and cos_sin.shape[0] >= at_least,
        lambda: (
            f"{name}: cos_sin has shape {list(cos_sin.shape)}; expected [positions, 2, rotary_dim / 2]"
            f"{rows} and 0 < rotary_dim <= {head_dim}"
        ),
    )
    require(
        cos_sin.dtype == torch.float32,
        lambda: (
            f"{name}: cos_sin has dtype {cos_sin.dtype}; keep it torch.float32, as rotary_table makes it "
            f"(a module that is converted converts its buffers too)"
        ),
    )
