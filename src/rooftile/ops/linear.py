"""Linear layers over packed weights: y = x W^T + bias."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rooftile.kernels.cpu import weights
from rooftile.kernels.reference import int4_words
from rooftile.ops.check import (
    check_device,
    check_float,
    check_same,
    check_shape,
    check_tensors,
    require,
)
from rooftile.ops.operator import Operator
from rooftile.types import PackedWeight


@dataclass(frozen=True)
class LinearCall:
    """The static properties that choose a kernel."""

    device: str
    dtype: torch.dtype
    format: str


@dataclass(frozen=True)
class Format:
    """One layout of a weight.

    refusal: (device type, dtype) -> `None`, or the reason why this machine cannot use it.
    pack: [out_features, in_features] -> the tensors of `PackedWeight.tensors`, in schema order.
    unpack: a packed weight -> [out_features, in_features].
    is_exact: values and dtype of the weight are kept; else it is quantised.
    """

    refusal: Callable[[str, torch.dtype], str | None]
    pack: Callable[[Tensor], dict[str, Tensor]]
    unpack: Callable[[PackedWeight], Tensor]
    is_exact: bool = True


def _onednn_refusal(device: str, dtype: torch.dtype) -> str | None:
    if device != "cpu":
        return f"oneDNN weights are for the CPU, not for {device!r}"
    if dtype not in (torch.bfloat16, torch.float32):
        return f"oneDNN weights are bfloat16 or float32, not {dtype}"
    if not torch.backends.mkldnn.is_available() or not hasattr(
        torch.ops.mkldnn, "_linear_pointwise"
    ):
        return "this torch was built without oneDNN"
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "this CPU has no AVX-512, which oneDNN needs for bfloat16"
    return None


def _native_format(name: str) -> Format:
    def packed(weight: Tensor) -> dict[str, Tensor]:
        rows, columns = weight.shape
        tensors = weights.empty(name, rows, columns, weight.dtype)
        weights.put_rows(name, tensors, (rows, columns), weight)
        return tensors

    return Format(
        refusal=lambda device, dtype: weights.refusal(name, device, dtype),
        pack=packed,
        unpack=lambda weight: weights.unpack(name, list(weight.tensors.values()), *weight.shape),
        is_exact=name == "tiled",
    )


def _int4_words_refusal(device: str, dtype: torch.dtype) -> str | None:
    if device != "cuda":
        return f"int4_words weights are for an NVIDIA GPU, not for {device!r}"
    return None


FORMATS = {
    "dense": Format(
        refusal=lambda device, dtype: None,
        pack=lambda weight: {"weight": weight},
        unpack=lambda packed: packed.tensors["weight"],
    ),
    "onednn": Format(
        refusal=_onednn_refusal,
        pack=lambda weight: {"weight": torch.ops.mkldnn._reorder_linear_weight(weight.detach())},
        unpack=lambda packed: packed.tensors["weight"].to_dense(),
    ),
    "tiled": _native_format("tiled"),
    "int8": _native_format("int8"),
    "int8_blocks": _native_format("int8_blocks"),
    "int4": _native_format("int4"),
    "int4_words": Format(
        refusal=_int4_words_refusal,
        pack=int4_words.pack,
        unpack=lambda packed: int4_words.unpack(
            packed.tensors["weight"], packed.tensors["scale"], packed.shape[1]
        ),
        is_exact=False,
    ),
}


def best_format(device: torch.device | str, dtype: torch.dtype) -> str:
    """The fastest format on this machine for inference with weights of `dtype` on `device`."""
    device = torch.device(device).type
    usable = (f for f in ("tiled", "onednn") if FORMATS[f].refusal(device, dtype) is None)
    return next(usable, "dense")


def pack(weight: Tensor, format: str) -> PackedWeight:  # weight [out_features, in_features]
    """The weight in the layout that the kernels of `format` read.

    "dense" keeps the tensor itself (and its gradient). The others are copies for inference on a
    CPU: "onednn" and "tiled" in blocked layouts, in bfloat16 or float32; quantised are "int8"
    (a scale for each row), "int8_blocks" (a scale for 32 columns of a row) and "int4" (a scale and
    a minimum for 32 columns of a row, those with the least squared error among some tried).
    Products with these take activations as bytes, with a scale for 32 of a token's. "int4_words" is
    for inference on a GPU with bfloat16 activations: a scale for 32 columns of a row, that with the
    least squared error among some tried (kernels/reference/int4_words.py).

    Raises:
        ValueError: an unknown format, or a weight that is not a floating-point matrix.
        NotImplementedError: this machine, device or dtype cannot use the format, or the weight
            requires a gradient, which only "dense" has.
    """
    require(
        format in FORMATS,
        lambda: (
            f"pack: format {format!r} does not exist; choose one of {', '.join(map(repr, FORMATS))}"
        ),
    )
    check_tensors("pack", weight=weight)
    check_float("pack", weight=weight)
    require(
        weight.dim() == 2,
        lambda: (
            f"pack: weight has shape {list(weight.shape)}; expected [out_features, in_features]"
        ),
    )
    reason = FORMATS[format].refusal(weight.device.type, weight.dtype)
    if reason is None and format != "dense" and weight.requires_grad:
        reason = "the weight requires a gradient, which packed formats do not have"
    if reason is None and format != "dense" and 0 in weight.shape:
        reason = f"the weight is empty: {list(weight.shape)}"
    if reason is not None:
        raise NotImplementedError(f"pack: format {format!r}: {reason}; use format 'dense'")
    out_features, in_features = weight.shape
    return PackedWeight(format, FORMATS[format].pack(weight), (out_features, in_features))


def unpack(weight: PackedWeight) -> Tensor:
    """The weight as a dense tensor [out_features, in_features]; float32 where it was quantised."""
    return FORMATS[weight.format].unpack(weight)


def linear(
    x: Tensor,  # [..., in_features]
    weight: PackedWeight | Tensor,  # [out_features, in_features]
    bias: Tensor | None = None,  # [out_features]
    *,
    kernel: str = "auto",
) -> Tensor:
    """x W^T + bias -> [..., out_features] in x's dtype, accumulated in float32 or wider.

    A plain tensor is a "dense" weight. Differentiable in x, weight and bias for "dense".

    Raises:
        ValueError: shapes, dtypes, devices or a format that do not fit.
        NotImplementedError: a gradient is asked of a packed weight, or the kernel given cannot run
            the call.
    """
    if isinstance(weight, Tensor):
        require(
            weight.dim() == 2,
            lambda: (
                f"linear: weight has shape {list(weight.shape)}; expected [out_features, in_features]"
            ),
        )
        weight = PackedWeight("dense", {"weight": weight}, (weight.shape[0], weight.shape[1]))
    require(
        isinstance(weight, PackedWeight),
        lambda: f"linear: weight is {weight!r:.80}; give a tensor, or what pack() returns",
    )
    require(
        weight.format in FORMATS,
        lambda: (
            f"linear: weight has format {weight.format!r}; pack it as one of "
            f"{', '.join(map(repr, FORMATS))}"
        ),
    )
    out_features, in_features = weight.shape
    tensors = list(weight.tensors.values())
    check_tensors("linear", x=x)
    check_float("linear", x=x)
    check_same("linear", x=x, bias=bias)
    if FORMATS[weight.format].is_exact:
        check_same("linear", x=x, weight=tensors[0])
    else:
        check_device("linear", x=x, weight=tensors[0])
    require(
        x.dim() > 0 and x.shape[-1] == in_features,
        lambda: (
            f"linear: x has shape {list(x.shape)}; expected [..., in_features] with in_features = "
            f"{in_features}, as the weight has"
        ),
    )
    if bias is not None:
        check_shape("linear", "bias", bias, (out_features,), "[out_features]")
    if weight.format != "dense" and torch.is_grad_enabled():
        for name, tensor in (("x", x), ("bias", bias)):
            if tensor is not None and tensor.requires_grad:
                raise NotImplementedError(
                    f"linear: {name} requires a gradient, but a weight of format "
                    f"{weight.format!r} is for inference; pack it as 'dense' or use torch.no_grad()"
                )
    return LINEAR.handle(x, tensors, weight.format, out_features, bias, kernel)


LINEAR = Operator(
    "linear",
    "(Tensor x, Tensor[] weight, str format, int out_features, Tensor? bias) -> Tensor",
    module="linear",
    families=("triton", "gluon", "cpu", "torch", "reference"),
    call=lambda x, weight, format, *_: LinearCall(x.device.type, x.dtype, format),
    fake=lambda x, weight, format, out_features, bias: x.new_empty((*x.shape[:-1], out_features)),
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, format, _, bias, _ = inputs
    ctx.format, ctx.has_bias = format, bias is not None
    ctx.save_for_backward(x, *weight)


def _backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
    if ctx.format != "dense":
        raise NotImplementedError(
            f"linear: a weight of format {ctx.format!r} has no gradient; pack it as 'dense'"
        )
    x, weight = ctx.saved_tensors
    needs_x, (needs_weight,), _, _, needs_bias, _ = ctx.needs_input_grad
    rows = grad_out.reshape(-1, grad_out.shape[-1])
    return (
        grad_out @ weight if needs_x else None,
        [rows.T @ x.reshape(-1, x.shape[-1]) if needs_weight else None],
        None,
        None,
        rows.sum(0) if needs_bias and ctx.has_bias else None,
        None,
    )


LINEAR.register_autograd(_backward, _setup_context)
