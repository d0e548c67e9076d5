"""The angles of rotary position embedding: what a model's configuration asks, and their table."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class LinearScaling:
    """Positions divided by `factor` (Chen et al. 2023, "Position interpolation")."""

    factor: float

    def __post_init__(self) -> None:
        _check_number(self, "factor", at_least=1)


@dataclass(frozen=True)
class DynamicScaling:
    """A base that grows once the table is longer than the model was trained for (dynamic NTK).

    It is fixed by the length of the table, so no request changes another's angles.
    """

    factor: float
    original_max_position: int

    def __post_init__(self) -> None:
        _check_number(self, "factor", at_least=1)
        _check_number(self, "original_max_position", at_least=1, integer=True)


@dataclass(frozen=True)
class Llama3Scaling:
    """Long wavelengths divided by `factor`, short ones kept, a ramp between (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int

    def __post_init__(self) -> None:
        _check_number(self, "factor", at_least=1)
        _check_number(self, "low_freq_factor", above=0)
        _check_number(self, "high_freq_factor", above=self.low_freq_factor)
        _check_number(self, "original_max_position", at_least=1, integer=True)


@dataclass(frozen=True)
class YarnScaling:
    """Interpolation by parts and a factor on cos and sin (Peng et al. 2023, "YaRN", eq. 17-22).

    attention_factor: multiplies cos and sin; `None` takes 0.1 ln(factor) + 1, or with mscale and
        mscale_all_dim (0 counts as absent) the quotient of the two so weighted.
    beta_fast, beta_slow: rotations over the original context that begin and end the ramp.
    truncate: whether the ramp's ends are rounded outwards to whole dimensions.
    """

    factor: float
    original_max_position: int
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def __post_init__(self) -> None:
        _check_number(self, "factor", at_least=1)
        _check_number(self, "original_max_position", at_least=1, integer=True)
        if self.attention_factor is not None:
            _check_number(self, "attention_factor", above=0)
        for name in ("mscale", "mscale_all_dim"):
            if getattr(self, name) is not None:
                _check_number(self, name, at_least=0)
        _check_number(self, "beta_slow", above=0)
        _check_number(self, "beta_fast", at_least=self.beta_slow)
        if not isinstance(self.truncate, bool):
            raise ValueError(
                f"YarnScaling: truncate is {self.truncate!r}; it must be true or false"
            )


@dataclass(frozen=True)
class LongRopeScaling:
    """A divisor for each frequency and a factor on cos and sin (Ding et al. 2024, "LongRoPE").

    The table's length chooses the divisors, `long_factor` where it goes beyond
    original_max_position, so that no request's length changes its own or another's angles.
    factor: how much longer the context has become; attention_factor: on cos and sin, `None` takes
        sqrt(1 + ln(factor) / ln(original_max_position)).
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    factor: float
    original_max_position: int
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        for name in ("short_factor", "long_factor"):
            values = getattr(self, name)
            if not isinstance(values, tuple) or not all(
                isinstance(value, (int, float)) and value > 0 for value in values
            ):
                raise ValueError(
                    f"LongRopeScaling: {name} is {values!r}; it must be a list of numbers above 0"
                )
        _check_number(self, "factor", above=0)
        _check_number(self, "original_max_position", at_least=2, integer=True)
        if self.attention_factor is not None:
            _check_number(self, "attention_factor", above=0)


Scaling = LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling | LongRopeScaling
HUGGING_FACE_TYPES: dict[str, type[Scaling]] = {
    "linear": LinearScaling,
    "dynamic": DynamicScaling,
    "llama3": Llama3Scaling,
    "yarn": YarnScaling,
    "longrope": LongRopeScaling,
}
# Hugging Face's names that differ from ours, and fields that RotaryConfig itself takes.
ORIGINAL = "original_max_position_embeddings"
OUTSIDE = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}


@dataclass(frozen=True)
class RotaryConfig:
    """How positions become angles: theta_i = base^(-2i / dim), scaled.

    dim: how many dimensions of a head are turned (an even number), at most head_dim.
    """

    dim: int
    base: float = 10000.0
    scaling: Scaling | None = None

    def __post_init__(self) -> None:
        _check_number(self, "dim", at_least=2, integer=True)
        if self.dim % 2:
            raise ValueError(
                f"RotaryConfig: dim is {self.dim}; pairs are turned, so it must be even"
            )
        _check_number(self, "base", above=1)
        if isinstance(self.scaling, DynamicScaling) and self.dim == 2:
            raise ValueError("RotaryConfig: dim is 2; dynamic scaling needs at least 4")
        if isinstance(self.scaling, LongRopeScaling):
            for name in ("short_factor", "long_factor"):
                count = len(getattr(self.scaling, name))
                if count != self.dim // 2:
                    raise ValueError(
                        f"RotaryConfig: {name} holds {count} numbers; dim = {self.dim} needs "
                        f"{self.dim // 2}"
                    )

    @classmethod
    def from_hugging_face(
        cls,
        parameters: Mapping[str, Any] | None,
        *,
        dim: int,
        base: float = 10000.0,
        max_position: int,
    ) -> RotaryConfig:
        """From `rope_parameters` (or the older `rope_scaling`) of a config.json.

        dim: head_dim times partial_rotary_factor, which the caller has applied. base:
        `rope_theta`, where the parameters do not carry it. max_position: the config's
        max_position_embeddings, which dynamic scaling starts from and LongRoPE extends to.

        Raises:
            NotImplementedError: a rope_type that is not supported.
            ValueError: a field that is missing, unknown or out of range; the error names it.
        """
        given = dict(parameters or {})
        kind = given.get("rope_type", given.get("type", "default"))
        base = given.get("rope_theta", base)
        given = {name: value for name, value in given.items() if name not in OUTSIDE}
        if kind == "default":
            _check_names(kind, given, allowed=set(), required=set())
            return cls(dim, base)
        if kind not in HUGGING_FACE_TYPES:
            raise NotImplementedError(
                f"rope_type {kind!r} is not supported; supported are 'default', "
                f"{', '.join(map(repr, HUGGING_FACE_TYPES))}"
            )
        scaling_type = HUGGING_FACE_TYPES[kind]
        theirs = {"original_max_position": ORIGINAL}
        names = {theirs.get(field.name, field.name): field for field in fields(scaling_type)}
        if kind == "dynamic":
            given.setdefault(ORIGINAL, max_position)
        if kind == "longrope":
            original = given.get(ORIGINAL)
            if given.get("factor") is None and isinstance(original, int) and original > 0:
                given["factor"] = max_position / original
            given = {n: tuple(v) if isinstance(v, list) else v for n, v in given.items()}
        if kind == "yarn" and given.get("factor", 0) is None:
            original = given.get(ORIGINAL)
            if isinstance(original, int) and original > 0:
                given["factor"] = max_position / original
        required = {name for name, field in names.items() if field.default is MISSING}
        # A null in the file is an optional field left out.
        given = {n: value for n, value in given.items() if value is not None or n in required}
        _check_names(kind, given, allowed=set(names), required=required)
        return cls(dim, base, scaling_type(**{names[n].name: v for n, v in given.items()}))


def rotary_table(
    config: RotaryConfig, max_position: int, *, device: torch.device | str | None = None
) -> Tensor:
    """cos and sin of the positions 0 to max_position - 1: [max_position, 2, dim / 2] float32.

    Angles are taken in float32, as models are trained with them; YaRN's attention factor is folded
    into both.

    Raises:
        ValueError: max_position below 0.
    """
    if max_position < 0:
        raise ValueError(f"rotary_table: max_position is {max_position}; it must not be negative")
    frequencies, factor = _frequencies(config, max_position)
    positions = torch.arange(max_position, dtype=torch.float32)
    angles = positions[:, None] * frequencies
    return (torch.stack([angles.cos(), angles.sin()], 1) * factor).to(device)


def _frequencies(config: RotaryConfig, max_position: int) -> tuple[Tensor, float]:
    """Radians a position, [dim / 2] float32, and the factor on cos and sin."""
    scaling, base = config.scaling, config.base
    if isinstance(scaling, DynamicScaling):
        length = max(max_position, scaling.original_max_position)
        growth = scaling.factor * length / scaling.original_max_position - (scaling.factor - 1)
        base = base * growth ** (config.dim / (config.dim - 2))
    wavelengths = base ** (torch.arange(0, config.dim, 2, dtype=torch.float32) / config.dim)
    plain = 1.0 / wavelengths
    if isinstance(scaling, LinearScaling):
        return plain / scaling.factor, 1.0
    if isinstance(scaling, Llama3Scaling):
        return _llama3(plain, scaling), 1.0
    if isinstance(scaling, YarnScaling):
        return _yarn(config, wavelengths, scaling), _yarn_attention_factor(scaling)
    if isinstance(scaling, LongRopeScaling):
        is_long = max_position > scaling.original_max_position
        divisors = torch.tensor(scaling.long_factor if is_long else scaling.short_factor)
        return 1.0 / (divisors * wavelengths), _longrope_attention_factor(scaling)
    return plain, 1.0


def _llama3(plain: Tensor, scaling: Llama3Scaling) -> Tensor:
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelength = 2 * math.pi / plain
    rotations = scaling.original_max_position / wavelength
    smooth = (rotations - low) / (high - low)
    between = (1 - smooth) * plain / scaling.factor + smooth * plain
    long = wavelength > scaling.original_max_position / low
    short = wavelength < scaling.original_max_position / high
    return torch.where(long, plain / scaling.factor, torch.where(short, plain, between))


def _yarn(config: RotaryConfig, wavelengths: Tensor, scaling: YarnScaling) -> Tensor:
    def dimension_of(rotations: float) -> float:
        context = scaling.original_max_position / (rotations * 2 * math.pi)
        return config.dim * math.log(context) / (2 * math.log(config.base))

    low, high = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.dim - 1)
    if low == high:
        high += 0.001
    ramp = (torch.arange(config.dim // 2, dtype=torch.float32) - low) / (high - low)
    kept = 1 - ramp.clamp(0, 1)
    return 1 / (scaling.factor * wavelengths) * (1 - kept) + 1 / wavelengths * kept


def _yarn_attention_factor(scaling: YarnScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    log_factor = 0.1 * math.log(scaling.factor)
    if scaling.mscale and scaling.mscale_all_dim:
        return (scaling.mscale * log_factor + 1) / (scaling.mscale_all_dim * log_factor + 1)
    return log_factor + 1


def _longrope_attention_factor(scaling: LongRopeScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(scaling.factor) / math.log(scaling.original_max_position))


def _check_number(
    owner: object,
    name: str,
    *,
    at_least: float = -math.inf,
    above: float = -math.inf,
    integer: bool = False,
) -> None:
    value = getattr(owner, name)
    if (
        not isinstance(value, (int, float))
        or isinstance(value, bool)
        or (integer and not isinstance(value, int))
        or not abs(value) <= sys.float_info.max  # neither NaN nor an integer beyond all floats
        or value < at_least
        or value <= above
    ):
        limit = f"above {above:g}" if math.isfinite(above) else f"at least {at_least:g}"
        raise ValueError(
            f"{type(owner).__name__}: {name} is {value!r}; it must be "
            f"{'an integer' if integer else 'a number'} {limit}"
        )


def _check_names(
    kind: str, given: Mapping[str, Any], *, allowed: set[str], required: set[str]
) -> None:
    missing = sorted(required - set(given))
    if missing:
        raise ValueError(f"rope_type {kind!r} needs the field {', '.join(map(repr, missing))}")
    unknown = sorted(set(given) - allowed)
    if unknown:
        takes = ", ".join(map(repr, sorted(allowed))) or "none"
        raise ValueError(
            f"rope_type {kind!r} has no field {', '.join(map(repr, unknown))}; its fields: {takes}"
        )
