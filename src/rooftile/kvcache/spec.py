"""KV groups: layers that keep the same thing per token share one page table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rooftile.types import KVSpec


@dataclass(frozen=True)
class KVGroup:
    """The layers (indices into the model's) of one spec.

    Raises:
        ValueError: no layer, or a spec without heads, keys or values.
    """

    spec: KVSpec
    layers: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("heads", "k_dim", "v_dim"):
            value = getattr(self.spec, name)
            if value < 1:
                raise ValueError(
                    f"KVSpec of layers {list(self.layers)}: {name} is {value}; it must be at least 1"
                )
        if not self.layers:
            raise ValueError("KVGroup: layers is empty; name at least one layer")

    @property
    def bytes_per_token(self) -> int:
        """Of all layers of the group together; times page_size, the bytes of one page id."""
        return self.spec.bytes_per_token * len(self.layers)


def group_layers(specs: Sequence[KVSpec]) -> tuple[KVGroup, ...]:
    """Layers of equal spec form one group; groups come in the order of their first layer."""
    layers: dict[KVSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        layers.setdefault(spec, []).append(layer)
    return tuple(KVGroup(spec, tuple(indices)) for spec, indices in layers.items())
