"""/v1/models and /version."""

from __future__ import annotations

from typing import Literal

from rooftile.server.protocol.base import ServerModel


class ModelCard(ServerModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int
    sampling_defaults: dict[str, float]  # of what a request leaves out


class ModelList(ServerModel):
    object: Literal["list"]
    data: list[ModelCard]


class Version(ServerModel):
    version: str
