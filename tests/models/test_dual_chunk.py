"""Which models read `dual_chunk_attention_config`, and what they make of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rooftile.layers.attention import AttentionLayer
from rooftile.layers.dual_chunk import DualChunkAttentionLayer
from rooftile.models import native
from rooftile.models.loader import load_model
from rooftile.ops.dual_chunk_rotary import DualChunkConfig
from tests.models import hugging_face
from tests.models.test_families import QWEN3_MOE

GIVEN = {"chunk_size": 64, "local_size": 16, "original_max_position_embeddings": 32}


def save(directory: Path, model_type: str, dual_chunk: Any, **options: Any) -> str:
    model = hugging_face.random_model(model_type, num_hidden_layers=2, **options)
    hugging_face.save(model, directory)
    hugging_face.edit_config(directory, dual_chunk_attention_config=dual_chunk)
    return str(directory)


@pytest.mark.parametrize(
    ("model_type", "options"),
    [("qwen2", {}), ("qwen3", {"head_dim": 8}), ("qwen3_moe", QWEN3_MOE)],
)
def test_the_field_is_read(model_type: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Keys that switch sparse prefill off are understood."""
    off = {**GIVEN, "sparse_attention_enabled": False, "sparse_attention_threshold": 100}
    loaded = load_model(save(tmp_path, model_type, off, **options), dtype=torch.float32)
    assert {layer.attention.dual_chunk for layer in loaded.config.layers} == {
        DualChunkConfig(64, 16, 32)
    }
    for layer in loaded.decoder.layers:
        assert isinstance(layer.attention, DualChunkAttentionLayer)
        assert layer.attention.cos_sin is not None
        assert layer.attention.cos_sin.shape[0] == 65
    assert native.refusal(loaded.decoder) is not None


def test_why_the_native_step_refuses(tmp_path: Path) -> None:
    if native.library.refusal() is not None:
        pytest.skip("this machine has no native kernels")
    loaded = load_model(save(tmp_path, "qwen2", GIVEN), dtype=torch.float32)
    reason = native.refusal(loaded.decoder)
    assert reason == "layer 0: its attention is a DualChunkAttentionLayer"


def test_layers_with_a_window_keep_it(tmp_path: Path) -> None:
    windows = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    loaded = load_model(save(tmp_path, "qwen2", GIVEN, **windows), dtype=torch.float32)
    full, windowed = loaded.decoder.layers
    assert isinstance(full.attention, DualChunkAttentionLayer)
    assert type(windowed.attention) is AttentionLayer


def test_absent_or_empty_is_plain(tmp_path: Path) -> None:
    for given in (None, {}):
        loaded = load_model(save(tmp_path, "qwen2", given), dtype=torch.float32)
        assert type(loaded.decoder.layers[0].attention) is AttentionLayer


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"chunk_size": 64}, "dual_chunk_attention_config: local_size is missing"),
        (
            {**GIVEN, "local_size": 64},
            "dual_chunk_attention_config: .*chunk_size is 64 and local_s",
        ),
        ({**GIVEN, "chunk_size": "64"}, "dual_chunk_attention_config: chunk_size is '64'"),
        (
            {**GIVEN, "chunks": 2},
            "dual_chunk_attention_config: chunks is not known; its fields are",
        ),
        ([64, 16], "dual_chunk_attention_config is .64, 16.; expected an object"),
    ],
)
def test_bad_fields_are_named(given: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        load_model(save(tmp_path, "qwen2", given), dtype=torch.float32)


@pytest.mark.parametrize(
    "sparse",
    [
        {"sparse_attention_enabled": True},
        {"sparse_attention_enabled": True, "sparse_attention_config": {"0": {}}},
        {"sparse_attention_config": {"0": {}}},
    ],
)
def test_sparse_prefill_is_refused_by_its_name(sparse: dict[str, Any], tmp_path: Path) -> None:
    (name, *_) = sparse
    message = f"dual_chunk_attention_config: {name} asks for sparse prefill.*enabled to false"
    with pytest.raises(NotImplementedError, match=message):
        load_model(save(tmp_path, "qwen3", {**GIVEN, **sparse}, head_dim=8), dtype=torch.float32)


def test_other_families_refuse_the_field(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="dual_chunk_attention_config is .* not supported for this"
    ):
        load_model(save(tmp_path, "llama", GIVEN), dtype=torch.float32)


def test_an_option_takes_the_place_of_the_field(tmp_path: Path) -> None:
    directory = save(tmp_path, "qwen2", GIVEN)
    own = DualChunkConfig(40, 8)
    loaded = load_model(directory, dtype=torch.float32, dual_chunk=own, max_model_len=10_000)
    assert loaded.config.layers[0].attention.dual_chunk == own
    assert loaded.config.max_position == 10_000
