"""Where a checkpoint keeps our tensors: several of them may be rows of one that it stores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rooftile.models.config import DecoderConfig
from rooftile.models.weights import LAMBDAS, weight_shapes


@dataclass(frozen=True)
class Place:
    """One of our tensors in a checkpoint.

    tensor: the stored tensor's name; shape: its whole shape. Ours are its rows
    [first_row, first_row + rows), counted over all dimensions but the last.
    """

    tensor: str
    shape: tuple[int, ...]
    first_row: int
    rows: int


def places(config: DecoderConfig, templates: Mapping[str, str]) -> dict[str, Place]:
    """Our name of every tensor -> where it is.

    templates: our name -> the checkpoint's, both without ".weight" or ".bias", "{i}" for the layer
        and "{e}" for the expert. Where several tensors of ours have the same place, they are its
        rows in the order of `weight_shapes`: experts as a stack with a dimension of its own,
        others (q, k and v; gate and up) one after the other.
    """
    shapes = weight_shapes(config)
    sharers: dict[str, list[str]] = {}
    stacks = set()
    for ours in shapes:
        stored, is_stack = _stored_name(ours, templates)
        sharers.setdefault(stored, []).append(ours)
        if is_stack:
            stacks.add(stored)
    found = {}
    for stored, names in sharers.items():
        parts = [shapes[name] for name in names]
        whole = (sum(shape[0] for shape in parts), *parts[0][1:])
        if stored in stacks:
            whole = (len(parts), *parts[0])
        first_row = 0
        for name, shape in zip(names, parts, strict=True):
            found[name] = Place(stored, whole, first_row, shape[0])
            first_row += shape[0]
    return {name: found[name] for name in shapes}


def _stored_name(ours: str, templates: Mapping[str, str]) -> tuple[str, bool]:
    """The stored tensor's name, and whether it is a stack of experts."""
    base, kind = (ours[:-5], "bias") if ours.endswith(".bias") else (ours, "weight")
    layer = expert = ""
    parts = base.split(".")
    if parts[0] == "layers":
        layer, parts[1] = parts[1], "{i}"
        if parts[2] == "experts":
            expert, parts[3] = parts[3], "{e}"
    template = templates[".".join(parts)]
    name = template.replace("{i}", layer).replace("{e}", expert)
    if parts[-1] in LAMBDAS:  # a parameter of the layer itself, so no module's weight
        return name, False
    return f"{name}.{kind}", expert != "" and "{e}" not in template


def check_places(
    wanted: Mapping[str, Place],
    stored: Mapping[str, tuple[int, ...]],
    unexpected: tuple[str, ...],
    where: str,
) -> None:
    """One error that lists every missing, unexpected and misshapen tensor of a checkpoint."""
    shapes = {place.tensor: place.shape for place in wanted.values()}
    problems = {
        "missing": [name for name in shapes if name not in stored],
        "unexpected": list(unexpected),
        "misshapen": [
            f"{name} is {list(stored[name])}, expected {list(shape)}"
            for name, shape in shapes.items()
            if name in stored and stored[name] != shape
        ],
    }
    if any(problems.values()):
        lines = [
            f"  {len(names)} {kind}: {', '.join(names)}"
            for kind, names in problems.items()
            if names
        ]
        raise ValueError(
            f"{where}: the tensors do not fit the model that its configuration describes\n"
            + "\n".join(lines)
        )
