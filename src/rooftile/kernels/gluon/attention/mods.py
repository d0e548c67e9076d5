"""Functions of the caller that the attention kernel inlines."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Mods:
    """Modifiers of scores and visibility: jitted functions, and the tensors that they capture."""

    score: Any = None
    mask: Any = None
    score_tensors: tuple[Tensor, ...] = ()
    mask_tensors: tuple[Tensor, ...] = ()

    @property
    def functions(self) -> tuple[Any, Any]:
        return self.score, self.mask

    @property
    def captured(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        return self.score_tensors, self.mask_tensors


NO_MODS = Mods()
