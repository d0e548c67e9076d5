"""Weights from a directory in Hugging Face format: one safetensors file, or several with an index."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from rooftile.models.places import Place
from rooftile.models.resolve import readable
from rooftile.models.weights import WHOLE

INDEX = "model.safetensors.index.json"
FLOATS = ("F64", "F32", "F16", "BF16")
# Buffers that old checkpoints carry and no model reads: they follow from the configuration.
HARMLESS = re.compile(r"(rotary_emb\.inv_freq|\.masked_bias|\.attn\.bias)$")


class Checkpoint:
    """The safetensors files of `directory`, under our names.

    places: of our tensors; ignored: the checkpoint's names that may be there unused. `shapes` has
    the stored tensors, `unexpected` those that no part of the model uses.

    Raises:
        ValueError: no safetensors files, a damaged or missing one, or tensors that are not
            floating-point numbers; lists them.
    """

    def __init__(
        self, directory: Path, places: Mapping[str, Place], ignored: frozenset[str] = frozenset()
    ) -> None:
        self._places = places
        self._files: dict[str, Any] = {}  # checkpoint's name -> the open file that has it
        stored: dict[str, tuple[int, ...]] = {}
        foreign = []
        for path in _files(directory):
            file = _open(path)
            for name in file.keys():  # noqa: SIM118  (not a dict)
                if name in self._files:
                    raise ValueError(f"{directory}: tensor {name!r} is in more than one file")
                view = file.get_slice(name)
                stored[name] = tuple(view.get_shape())
                self._files[name] = file
                if view.get_dtype() not in FLOATS:
                    foreign.append(f"{name} ({view.get_dtype()})")
        known = {place.tensor for place in places.values()}
        self.unexpected = tuple(
            sorted(
                name
                for name in stored
                if name not in known and name not in ignored and not HARMLESS.search(name)
            )
        )
        foreign = [entry for entry in foreign if entry.split(" ")[0] in known]
        if foreign:
            raise ValueError(
                f"{directory}: tensors that are not stored as one of {', '.join(FLOATS)}: "
                f"{', '.join(foreign)}; quantised safetensors are not supported, use the original "
                f"model or a GGUF file"
            )
        self.shapes: Mapping[str, tuple[int, ...]] = stored

    def read(self, name: str, out: Tensor, rows: slice = WHOLE, columns: slice = WHOLE) -> None:
        place = self._places[name]
        view = self._files[place.tensor].get_slice(place.tensor)
        first, last, _ = rows.indices(place.rows)
        rows = slice(place.first_row + first, place.first_row + last)
        out.copy_(view[rows] if len(place.shape) == 1 else view[rows, columns])


def _files(directory: Path) -> list[Path]:
    index = directory / INDEX
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text())["weight_map"]
            paths = sorted({directory / name for name in weight_map.values()})
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(
                f"{index}: not a valid index of safetensors files: {error!r}"
            ) from None
        absent = [path.name for path in paths if not path.is_file()]
        if absent:
            raise ValueError(
                f"{directory}: {INDEX} names files that are not there: {', '.join(absent)}; "
                f"download the model again"
            )
        return paths
    # "consolidated*" repeats the same weights under another naming in some repositories.
    paths = [
        path
        for path in sorted(directory.glob("*.safetensors"))
        if not path.name.startswith("consolidated")
    ]
    single = directory / "model.safetensors"
    if single in paths:
        return [single]
    if not paths:
        others = sorted(path.name for path in directory.glob("*.bin"))
        hint = (
            f"it has {', '.join(others)}: convert them to safetensors with transformers' "
            f"save_pretrained"
            if others
            else "download the model's weights, or ask for random weights"
        )
        raise ValueError(f"{directory}: no *.safetensors files; {hint}")
    return paths


def _open(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        with readable(str(path)):
            return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(
            f"{path}: not a readable safetensors file ({error}); it is truncated or damaged: "
            f"download it again"
        ) from None
