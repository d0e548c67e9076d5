"""Weights of linear layers in the layouts of their kernels: packing, unpacking, checking."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rooftile.kernels.cpu import weights
from rooftile.kernels.cpu.arena import ALIGNMENT
from rooftile.kernels.reference import int4_words
from rooftile.ops.check import check_float, check_tensors, require
from rooftile.types import PackedWeight

Layout = dict[str, tuple[tuple[int, ...], torch.dtype]]  # shape and dtype of each tensor, by name


@dataclass(frozen=True)
class Format:
    """One layout of a weight.

    refusal: (device type, dtype) -> `None`, or the reason why this machine cannot use it.
    pack: [out_features, in_features] -> the tensors of `PackedWeight.tensors`, in schema order.
    layout: out_features, in_features, dtype of the first tensor -> what these tensors are, whole and in
        one piece; `None`: as the weight itself.
    unpack: a packed weight -> [out_features, in_features].
    is_exact: values and dtype of the weight are kept; else it is quantised.
    """

    refusal: Callable[[str, torch.dtype], str | None]
    pack: Callable[[Tensor], dict[str, Tensor]]
    unpack: Callable[[PackedWeight], Tensor]
    layout: Callable[[int, int, torch.dtype], Layout] | None = None
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
        layout=lambda *sizes: weights.layout(name, *sizes),
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
        layout=lambda out_features, in_features, _: int4_words.layout(out_features, in_features),
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

    Args:
        weight: [out_features, in_features]

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
    """The weight as a dense tensor [out_features, in_features]; float32 where it was quantised.

    Raises:
        ValueError: a weight that `pack` cannot have made.
    """
    check_packed("unpack", "weight", weight)
    return FORMATS[weight.format].unpack(weight)


def check_packed(operator: str, name: str, weight: PackedWeight) -> None:
    """Refuses what `pack` cannot have made: kernels read as far as `shape` says, whatever is there.

    Once for each weight: it takes as long as the rest of a call's checks.
    """
    require(
        isinstance(weight, PackedWeight),
        lambda: f"{operator}: {name} is {weight!r:.80}; give a tensor, or what pack() returns",
    )
    if weight.is_checked:
        return
    require(
        weight.format in FORMATS,
        lambda: (
            f"{operator}: {name} has format {weight.format!r}; pack it as one of "
            f"{', '.join(map(repr, FORMATS))}"
        ),
    )
    label = f"{operator}: {name} of format {weight.format!r}"
    tensors, shape = weight.tensors, weight.shape
    require(
        len(shape) == 2 and min(shape) >= 0,
        lambda: f"{label} says that its shape is {shape}; expected (out_features, in_features)",
    )
    first = tensors.get("weight")
    require(
        isinstance(first, Tensor),
        lambda: (
            f"{label} has tensors {list(tensors)}; the first must be 'weight'; make it by pack()"
        ),
    )
    assert first is not None
    layout = FORMATS[weight.format].layout
    if layout is None:
        expected: Layout = {"weight": (shape, first.dtype)}
    else:
        expected = layout(*shape, first.dtype)
    require(
        list(tensors) == list(expected),
        lambda: (
            f"{label} has tensors {list(tensors)}; expected {list(expected)}, in this order; make it "
            f"by pack()"
        ),
    )
    check_tensors(operator, **tensors)
    for key, (size, dtype) in expected.items():
        tensor = tensors[key]
        require(
            tensor.shape == size and tensor.dtype == dtype,
            lambda key=key, size=size, dtype=dtype: (  # type: ignore[misc]
                f"{label} and shape {list(shape)} has {key} {list(tensors[key].shape)} {tensors[key].dtype}; "
                f"expected {list(size)} {dtype}; make it by pack()"
            ),
        )
        require(
            tensor.device == first.device,
            lambda key=key: (  # type: ignore[misc]
                f"{label} has {key} on {tensors[key].device} but weight on {first.device}; move one"
            ),
        )
        require(
            layout is None or (tensor.is_contiguous() and _is_aligned(tensor)),
            lambda key=key: (  # type: ignore[misc]
                f"{label} has a {key} that is part of another tensor; kernels read it in one piece from "
                f"a multiple of {ALIGNMENT} bytes: clone it"
            ),
        )
    if not torch.compiler.is_compiling():
        object.__setattr__(weight, "is_checked", True)


def _is_aligned(tensor: Tensor) -> bool:
    """As far as its memory begins where torch's allocators let memory begin. Not traced: torch.compile
    knows no offsets."""
    return (
        torch.compiler.is_compiling() or tensor.storage_offset() * tensor.itemsize % ALIGNMENT == 0
    )
