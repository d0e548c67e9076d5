"""Packed weights made by hand: what `pack` cannot have made is refused before a kernel reads past it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rooftile.kernels.reference import int4_words
from rooftile.layers.embedding import PackedEmbedding
from rooftile.layers.linear import Linear
from rooftile.ops.gemm import matmul
from rooftile.ops.linear import linear
from rooftile.ops.packed_weight import FORMATS, check_packed, pack, unpack
from rooftile.types import PackedWeight

SHAPE = (40, 200)  # no whole tiles, no whole groups
USABLE = [
    f for f in FORMATS if f == "int4_words" or FORMATS[f].refusal("cpu", torch.float32) is None
]
BLOCKED = [f for f in USABLE if FORMATS[f].layout is not None]


def packed(format: str) -> PackedWeight:
    weight = torch.randn(SHAPE)
    if format == "int4_words":  # pack() makes it for a GPU only
        return PackedWeight(format, int4_words.pack(weight), SHAPE)
    return pack(weight, format)


def changed(weight: PackedWeight, name: str, change: Callable[[Tensor], Any]) -> PackedWeight:
    return replace(weight, tensors={**weight.tensors, name: change(weight.tensors[name])})


@pytest.mark.parametrize("format", USABLE)
def test_what_pack_makes_is_taken(format: str) -> None:
    weight = packed(format)
    check_packed("here", "weight", weight)
    assert unpack(weight).shape == SHAPE
    assert linear(torch.randn(3, SHAPE[1]), weight).shape == (3, SHAPE[0])


@pytest.mark.parametrize("shape", [(41, 200), (57, 200), (40, 201), (40, 233), (40, 100), (4, 200)])
@pytest.mark.parametrize("format", USABLE)
def test_a_shape_that_the_tensors_do_not_hold(format: str, shape: tuple[int, int]) -> None:
    weight = replace(packed(format), shape=shape)
    layout = FORMATS[format].layout
    dtype = weight.tensors["weight"].dtype
    if layout is not None and layout(*shape, dtype) == layout(*SHAPE, dtype):
        linear(torch.randn(3, shape[1]), weight)  # within the last tile and group
        return
    with pytest.raises(ValueError, match=rf"linear: weight of format '{format}' and shape .* exp"):
        linear(torch.randn(3, shape[1]), weight)


@pytest.mark.parametrize("name", ["weight", "scale"])
@pytest.mark.parametrize("format", BLOCKED)
def test_tensors_that_do_not_fit(format: str, name: str) -> None:
    weight, x = packed(format), torch.randn(3, SHAPE[1])
    if name not in weight.tensors:
        pytest.skip("it has no scales")
    wrong: dict[str, tuple[Callable[[Tensor], Any], str]] = {
        "rows": (lambda t: t[:-1], "expected"),
        "groups": (lambda t: t[:, :-1], "expected"),
        "one dimension": (lambda t: t.flatten(), "expected"),
        "dtype": (lambda t: t.to(torch.float64), "expected"),
        "no tensor": (lambda t: t.tolist(), "must be"),
        "device": (lambda t: t.to("meta"), "meta"),
        "strides": (lambda t: t.mT.contiguous().mT, "clone it"),
        "memory": (lambda t: torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape), "clone"),
    }
    if len(weight.tensors) == 1:
        del wrong["device"]
    for change, message in wrong.values():
        bad = changed(weight, name, change)
        for use in (lambda bad=bad: linear(x, bad), lambda bad=bad: unpack(bad)):
            with pytest.raises(ValueError, match=message):
                use()
        with pytest.raises(ValueError, match=message):
            Linear(bad)
        with pytest.raises(ValueError, match=message):
            PackedEmbedding(bad, torch.float32)
        if format == "int4_words":
            with pytest.raises(ValueError, match=message):
                matmul(x, bad)


@pytest.mark.parametrize("format", [f for f in BLOCKED if f != "tiled"])
def test_tensors_of_other_names_or_in_another_order(format: str) -> None:
    weight, x = packed(format), torch.randn(3, SHAPE[1])
    swapped = dict(reversed(weight.tensors.items()))
    for tensors in (swapped, {"weight": weight.tensors["weight"]}, {"codes": x}, {}):
        with pytest.raises(ValueError, match="has tensors"):
            linear(x, replace(weight, tensors=tensors))


@pytest.mark.parametrize("shape", [(40,), (40, 200, 1), (-40, 200)])
def test_shapes_of_no_matrix(shape: Any) -> None:
    with pytest.raises(ValueError, match="expected \\(out_features, in_features\\)"):
        linear(torch.randn(3, 200), PackedWeight("dense", {"weight": torch.randn(SHAPE)}, shape))


@pytest.mark.skipif("tiled" not in USABLE, reason="the native kernels do not run here")
def test_memory_that_begins_anywhere() -> None:
    """Not torch's own: from_numpy, a file. The products load whole cache lines."""
    weight = packed("tiled")
    data = weight.tensors["weight"]
    memory = torch.empty(data.numel() * 4 + 128, dtype=torch.uint8).numpy()
    shift = -memory.ctypes.data % 64 + 4
    view = torch.from_numpy(memory[shift : shift + data.numel() * 4].view("float32"))
    moved = changed(weight, "weight", lambda t: view.view(t.shape).copy_(t))
    with pytest.raises(ValueError, match="must begin at a multiple of 64 bytes; clone it"):
        linear(torch.randn(3, SHAPE[1]), moved, kernel="cpu")
