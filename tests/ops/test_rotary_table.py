"""rotary_table equals transformers' functions for each scaling; wrong fields are named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from rooftile.ops.rotary_table import DynamicScaling, RotaryConfig, YarnScaling, rotary_table

HEADS, HEAD_DIM = 4, 64
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
CASES: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "default", "rope_theta": 500000.0},
    {"rope_type": "linear", "factor": 2.5},
    {"rope_type": "dynamic", "factor": 2.0},
    LLAMA3,
    LLAMA3 | {"low_freq_factor": 0.5, "high_freq_factor": 7.0, "rope_theta": 500000.0},
    YARN,
    YARN | {"beta_fast": 16, "beta_slow": 2},
    YARN | {"truncate": False},
    YARN | {"attention_factor": 1.5},
    YARN | {"mscale": 0.7, "mscale_all_dim": 0.5},
    YARN | {"mscale": 0.7, "mscale_all_dim": 0},
    YARN | {"factor": 1.0},
    # A base so small against the context that the ramp has no width.
    YARN | {"rope_theta": 2.0},
    {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 256},
]
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.01 * i for i in range(HEAD_DIM // 2)],
    "long_factor": [1.0 + 0.5 * i for i in range(HEAD_DIM // 2)],
    "original_max_position_embeddings": 256,
}


def config_of(parameters: dict[str, Any], max_position: int = 1024) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=HEADS * HEAD_DIM,
        num_attention_heads=HEADS,
        max_position_embeddings=max_position,
        rope_parameters={"rope_theta": 10000.0} | parameters,
    )


def ours(parameters: dict[str, Any], max_position: int = 1024) -> RotaryConfig:
    return RotaryConfig.from_hugging_face(parameters, dim=HEAD_DIM, max_position=max_position)


@pytest.mark.parametrize("parameters", CASES, ids=str)
def test_equals_transformers(parameters: dict[str, Any]) -> None:
    config = config_of(dict(parameters))
    kind = parameters["rope_type"]
    if kind == "default":
        frequencies, factor = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, None)
    angles = torch.arange(1024.0)[:, None] * frequencies
    table = rotary_table(ours(parameters), 1024)
    assert table.dtype == torch.float32
    assert table.shape == (1024, 2, HEAD_DIM // 2)
    torch.testing.assert_close(table[:, 0], angles.cos() * factor, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(table[:, 1], angles.sin() * factor, rtol=1e-5, atol=1e-4)


def test_dynamic_scaling_is_computed_for_the_length_of_the_table() -> None:
    parameters = {"rope_type": "dynamic", "factor": 3.0}
    frequencies, _ = ROPE_INIT_FUNCTIONS["dynamic"](config_of(parameters), None, seq_len=2000)
    table = rotary_table(ours(parameters), 2000)
    angles = torch.arange(2000.0)[:, None] * frequencies
    torch.testing.assert_close(table[:, 0], angles.cos(), rtol=1e-5, atol=2e-4)
    plain = rotary_table(RotaryConfig(HEAD_DIM), 1024)
    assert torch.equal(rotary_table(ours(parameters), 1024), plain)
    assert not torch.equal(table[:1024], plain)


def test_partial_dimensions_and_the_older_field_names() -> None:
    config = RotaryConfig.from_hugging_face(
        {"type": "linear", "factor": 2.0, "partial_rotary_factor": 0.25},
        dim=16,
        base=1e6,
        max_position=128,
    )
    angles = torch.arange(8.0)[:, None] / 2 * 1e6 ** (-torch.arange(0, 16, 2) / 16)
    torch.testing.assert_close(rotary_table(config, 8)[:, 1], angles.sin())
    assert RotaryConfig.from_hugging_face(None, dim=16, max_position=8) == RotaryConfig(16)
    assert rotary_table(config, 0).shape == (0, 2, 8)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (YARN | {"factor": 0.5}, "YarnScaling: factor is 0.5; it must be a number at least 1"),
        (YARN | {"factor": "4"}, "factor is '4'"),
        (YARN | {"beta_fast": 0.5}, "beta_fast is 0.5; it must be a number at least 1"),
        (YARN | {"attention_factor": -1.0}, "attention_factor is -1.0"),
        (YARN | {"truncate": 1}, "truncate is 1; it must be true or false"),
        (YARN | {"atention_factor": 1.0}, "'yarn' has no field 'atention_factor'"),
        (YARN | {"original_max_position_embeddings": 25.5}, "original_max_position is 25.5; it"),
        ({"rope_type": "yarn", "factor": 4.0}, "needs the field 'original_max_position_emb"),
        ({"rope_type": "linear"}, "'linear' needs the field 'factor'"),
        ({"rope_type": "linear", "factor": float("nan")}, "LinearScaling: factor is nan"),
        ({"rope_type": "default", "factor": 2.0}, "'default' has no field 'factor'"),
        (LLAMA3 | {"high_freq_factor": 1.0}, "high_freq_factor is 1.0; it must be .* above 1"),
        ({**LLAMA3, "low_freq_factor": True}, "low_freq_factor is True"),
        ({"rope_theta": 0.0}, "RotaryConfig: base is 0.0"),
        ({"rope_type": "longrope"}, "'longrope' needs the field 'factor', 'long_factor', 'orig"),
        (LONGROPE | {"long_factor": [1.0, 2.0]}, "long_factor holds 2 numbers; dim = 64 needs 32"),
        (LONGROPE | {"short_factor": 3}, "short_factor is 3; it must be a list of numbers"),
        (LONGROPE | {"original_max_position_embeddings": 1}, "original_max_position is 1; it"),
    ],
    ids=str,
)
def test_errors_name_the_field(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ours(parameters)


@pytest.mark.parametrize("more", [{}, {"attention_factor": 1.5}, {"factor": 0.5}], ids=str)
@pytest.mark.parametrize("length", [256, 257, 1024])
def test_longrope_goes_by_the_length_of_the_table(more: dict[str, Any], length: int) -> None:
    parameters = LONGROPE | more
    frequencies, factor = ROPE_INIT_FUNCTIONS["longrope"](
        config_of(dict(parameters)), None, seq_len=length
    )
    angles = torch.arange(float(length))[:, None] * frequencies
    table = rotary_table(ours(parameters), length)
    torch.testing.assert_close(table[:, 0], angles.cos() * factor, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(table[:, 1], angles.sin() * factor, rtol=1e-5, atol=1e-4)


def test_other_refusals() -> None:
    with pytest.raises(NotImplementedError, match="'ntk' is not supported; supported are"):
        ours({"rope_type": "ntk"})
    with pytest.raises(ValueError, match="dim is 7; pairs are turned"):
        RotaryConfig(7)
    with pytest.raises(ValueError, match="dim is 2; dynamic scaling needs"):
        RotaryConfig(2, scaling=DynamicScaling(2.0, 64))
    with pytest.raises(ValueError, match="max_position is -1"):
        rotary_table(RotaryConfig(8), -1)
    assert YarnScaling(2.0, 64) == YarnScaling(2.0, 64)
