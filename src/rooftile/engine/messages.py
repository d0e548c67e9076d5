"""What a client of the engine's loop sends; it answers with `SequenceDelta`s. Plain, picklable data."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from rooftile.engine.params import BeamSearchParams, Params


@dataclass(frozen=True)
class AddRequest:
    request_id: str
    prompt_ids: list[int]
    params: Params
    cache_salt: Hashable = None

    @property
    def num_outputs(self) -> int:
        params = self.params
        return params.n_best if isinstance(params, BeamSearchParams) else params.n


@dataclass(frozen=True)
class Refuse:
    """End a request that never began, and each of its outputs, with an error."""

    request_id: str
    num_outputs: int
    error: str


@dataclass(frozen=True)
class Finish:
    """End a request, or one of its sequences (index)."""

    request_id: str
    index: int | None = None


@dataclass(frozen=True)
class AskStats:
    """Answered with `EngineStats`."""


@dataclass(frozen=True)
class Shutdown:
    """End the loop; open requests are dropped."""


@dataclass(frozen=True)
class EngineDied:
    """The loop ended on an error; nothing will be answered any more."""

    error: str


ToEngine = AddRequest | Refuse | Finish | AskStats | Shutdown
