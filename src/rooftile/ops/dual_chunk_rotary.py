"""The positions of dual chunk attention (An et al. 2024, arXiv 2402.17463), and its queries.

Text is cut into chunks of L = chunk_size - local_size tokens. Key j stands at j mod L, and query i
has three positions, one for each distance in chunks between itself and a key; so no relative
position is larger than what a model was trained for. Indices are those of the released code, one
above the paper's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from rooftile.ops.check import (
    check_device,
    check_flags,
    check_float,
    check_integers,
    check_rotary_table,
    check_shape,
    check_tensors,
    check_whole,
    refuse_gradient,
    require,
)
from rooftile.ops.operator import Operator, contents_checked

LENGTH_FACTORS = ("query", "prompt")
SHORT = {"original": "original_max_position"}
_EXAMPLE = "give chunk_size=6144,local_size=1024, if you like original=8192 and length_factor=query or prompt"


@dataclass(frozen=True)
class DualChunkConfig:
    """Dual chunk attention of a model.

    chunk_size: positions that the model knows: the largest relative position is below it.
    local_size: how many tokens before a chunk's first one keep their true distance to it.
    original_max_position: the length that the model was trained for. Scores are multiplied by
        max(1, 0.1 ln(length / original_max_position) + 1) squared; `None`: they are not.
    length_factor: the length in it: a "query"'s own position + 1, so that no result depends on what
        comes after it, or, as in the released engines, a whole "prompt"'s, with which no two
        requests can share a prefix.
    """

    chunk_size: int
    local_size: int
    original_max_position: int | None = None
    length_factor: str = "query"

    def __post_init__(self) -> None:
        for name in ("chunk_size", "local_size", "original_max_position"):
            value = getattr(self, name)
            if value is None and name == "original_max_position":
                continue
            if type(value) is not int or not 1 <= value < 2**31:
                raise ValueError(
                    f"DualChunkConfig: {name} is {value!r:.80}; it must be a whole number of at "
                    f"least 1 and below 2**31"
                )
        check_chunks("DualChunkConfig", self.chunk_size, self.local_size)
        if self.length_factor not in LENGTH_FACTORS:
            raise ValueError(
                f"DualChunkConfig: length_factor is {self.length_factor!r}; "
                f"choose one of {', '.join(map(repr, LENGTH_FACTORS))}"
            )

    @classmethod
    def of(cls, given: DualChunkConfig | Mapping[str, Any] | str) -> DualChunkConfig:
        """From a mapping, or from text such as "chunk_size=6144,local_size=1024,original=8192".

        "original" is short for original_max_position.

        Raises:
            ValueError: a field that is missing, unknown or out of range.
        """
        if isinstance(given, DualChunkConfig):
            return given
        if isinstance(given, str):
            pairs = [_pair(part) for part in given.split(",")]
            given = dict(pairs)
            if len(given) < len(pairs):
                raise ValueError(f"dual_chunk has a field twice; {_EXAMPLE}")
        if not isinstance(given, Mapping):
            raise ValueError(f"dual_chunk is {given!r:.80}; {_EXAMPLE}")
        values = {SHORT.get(name, name): value for name, value in given.items()}
        known = [field.name for field in fields(cls)]
        unknown = [name for name in values if name not in known]
        missing = [name for name in ("chunk_size", "local_size") if name not in values]
        if unknown or missing or len(values) < len(given):
            problem = "has a field twice"
            if missing:
                problem = f"lacks {missing[0]}"
            if unknown:
                problem = f"has no field {unknown[0]!r:.80}"
            raise ValueError(f"dual_chunk {problem}; {_EXAMPLE}")
        return cls(**values)

    @property
    def chunk_len(self) -> int:
        """Tokens of a chunk, L."""
        return self.chunk_size - self.local_size

    @property
    def num_positions(self) -> int:
        """Rows that a rotary table needs."""
        return num_positions(self.chunk_size, self.local_size)


def _pair(part: str) -> tuple[str, Any]:
    name, equals, value = (text.strip() for text in part.partition("="))
    if not equals:
        raise ValueError(f"dual_chunk has {part!r:.80}, which is no name=value; {_EXAMPLE}")
    return name, int(value) if value.isascii() and value.isdigit() and len(value) < 20 else value


def check_chunks(name: str, chunk_size: int, local_size: int) -> None:
    check_whole(name, 1, local_size=local_size, chunk_size=chunk_size)
    require(
        chunk_size > local_size,
        lambda: (
            f"{name}: chunk_size is {chunk_size} and local_size is {local_size}; chunks of "
            f"chunk_size - local_size tokens must have at least one"
        ),
    )


def num_positions(chunk_size: int, local_size: int) -> int:
    """One more than the largest position of any query or key."""
    return min(2 * (chunk_size - local_size), chunk_size + 1)


@dataclass(frozen=True)
class DualChunkRotaryCall:
    """The static properties that choose a kernel."""

    device: str
    dtype: torch.dtype
    head_dim: int
    rotary_dim: int
    interleaved: bool


def dual_chunk_rotary_embedding(
    q: Tensor,  # [tokens, heads, head_dim]
    positions: Tensor,  # [tokens] int32 or int64, in the whole text
    cos_sin: Tensor,  # [min(2 * chunk_len, chunk_size + 1) or more, 2, rotary_dim / 2] float32
    *,
    chunk_size: int,
    local_size: int,
    original_max_position: int | None = None,
    lengths: Tensor | None = None,  # [tokens] int32 or int64
    interleaved: bool = False,
    kernel: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """The three queries of dual chunk attention: for keys of their own chunk, the one before, and
    all earlier ones.

    With L = chunk_size - local_size, query i is turned to the positions i mod L,
    min(i mod L + L, chunk_size) and min(2 L - 1, chunk_size). Keys go with `rotary_embedding` (or
    `append_kv`) at positions j mod L. With `original_max_position` all dimensions of a query are
    multiplied by max(1, 0.1 ln(length / original_max_position) + 1)^2, where length is i + 1, or
    what `lengths` says. Everything is computed in float32 or wider and rounded once to q's dtype.

    Args:
        q: [tokens, heads, head_dim]
        positions: [tokens] int32 or int64, in the whole text
        cos_sin: [min(2 * chunk_len, chunk_size + 1) or more, 2, rotary_dim / 2] float32
        lengths: [tokens] int32 or int64

    Returns:
        q_intra, q_succ, q_inter, each [tokens, heads, head_dim] in q's dtype.

    Raises:
        ValueError: shapes, dtypes, devices or sizes that do not fit, a table that is too short;
            and, where the contents are checked (on a CPU, or with ROOFTILE_CHECK=1), a negative
            position or a length below 1.
        NotImplementedError: q requires a gradient.
    """
    name = "dual_chunk_rotary_embedding"
    check_tensors(name, q=q, cos_sin=cos_sin)
    check_float(name, q=q)
    check_device(name, q=q, cos_sin=cos_sin)
    require(
        q.dim() == 3,
        lambda: f"{name}: q has shape {list(q.shape)}; expected [tokens, heads, head_dim]",
    )
    given = {"positions": positions} | ({} if lengths is None else {"lengths": lengths})
    for tensor_name, tensor in given.items():
        check_integers(name, tensor_name, tensor, q, "q")
        check_shape(name, tensor_name, tensor, (q.shape[0],), "[tokens]")
    check_chunks(name, chunk_size, local_size)
    check_rotary_table(name, cos_sin, q.shape[2], num_positions(chunk_size, local_size))
    if original_max_position is not None:
        check_whole(name, 1, original_max_position=original_max_position)
    refuse_gradient(name, q=q, cos_sin=cos_sin)
    check_flags(name, interleaved=interleaved)
    if contents_checked(positions) and positions.numel():
        _check_least(name, "positions", positions, 0)
        if lengths is not None:
            _check_least(name, "lengths", lengths, 1)
    q_intra, q_succ, q_inter = DUAL_CHUNK_ROTARY.handle(  # one after the other in memory
        *(q, positions, lengths, cos_sin, interleaved, chunk_size, local_size),
        *(original_max_position or 0, kernel),
    )
    return q_intra, q_succ, q_inter


def _check_least(name: str, tensor_name: str, tensor: Tensor, least: int) -> None:
    found = int(tensor.min())
    require(
        found >= least, lambda: f"{name}: {tensor_name} holds {found}; it must be at least {least}"
    )


DUAL_CHUNK_ROTARY = Operator(
    "dual_chunk_rotary",
    "(Tensor q, Tensor positions, Tensor? lengths, Tensor cos_sin, bool interleaved,"
    " int chunk_size, int local_size, int original_max_position) -> Tensor",
    module="dual_chunk_rotary",
    families=("triton", "reference"),
    call=lambda q, positions, lengths, cos_sin, interleaved, *_: DualChunkRotaryCall(
        q.device.type, q.dtype, q.shape[-1], 2 * cos_sin.shape[-1], interleaved
    ),
    fake=lambda q, *_: q.new_empty((3, *q.shape)),
)
