"""Model configurations of the benchmarks, usable as MODEL `bench:NAME` with random weights."""

from __future__ import annotations

from pathlib import Path

PREFIX = "bench:"
DIRECTORY = Path(__file__).parent / "models"


def preset_names() -> list[str]:
    return sorted(path.parent.name for path in DIRECTORY.glob("*/config.json"))


def resolve_model(model: str, random_weights: bool) -> str:
    """`bench:NAME` -> the directory of its config; anything else stays as it is."""
    if not model.startswith(PREFIX):
        return model
    name = model.removeprefix(PREFIX)
    if name not in preset_names():
        known = ", ".join(PREFIX + known for known in preset_names())
        raise ValueError(f"there is no benchmark model {model!r}; choose one of {known}")
    if not random_weights:
        raise ValueError(f"{model} is a configuration without weights; add --random-weights")
    return str(DIRECTORY / name)
