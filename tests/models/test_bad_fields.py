"""config.json files whose fields have the wrong type or an absurd size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rooftile.models.families import FAMILIES, Fields, family_of_config
from rooftile.models.families.family import Family
from rooftile.models.loader import load_model
from tests.models import hugging_face

ORIGINAL = "original_max_position_embeddings"
SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
)
WRONG: list[Any] = [
    5, -1, 0, 1.5, True, "x", [], {}, [[]], ["x"], [1], {"a": 1}, None, 10**12, 10**400,
    float("inf"), float("nan"),
]  # fmt: skip
WRONG_ROPE: list[Any] = [
    {"rope_type": []},
    {"type": {}},
    {"rope_type": "yarn", "factor": "x", ORIGINAL: 16},
    {"rope_type": "yarn", "factor": None, ORIGINAL: "y"},
    {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 10**400},
    {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 16, "truncate": 3},
    {"rope_type": "llama3", "factor": 10**400},
    {"rope_type": "linear", "factor": None},
    {"rope_type": "linear", "factor": 2, "rope_theta": 10**400},
    {"rope_type": "dynamic", "factor": 2, "rope_theta": "x"},
    {"rope_type": "longrope", "short_factor": "x", "long_factor": 5},
    {"rope_type": "default", "partial_rotary_factor": []},
    {"full_attention": 5, "sliding_attention": []},
]
FIELDS = [
    "architectures", "hidden_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "intermediate_size", "vocab_size",
    "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "hidden_act",
    "hidden_activation", "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor",
    "attention_bias", "mlp_bias", "sliding_window", "use_sliding_window", "layer_types",
    "max_window_layers", "mlp_only_layers", "decoder_sparse_step", "num_experts",
    "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob",
    "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping",
    "sliding_window_pattern", "rope_local_base_freq", "embedding_multiplier",
    "attention_multiplier", "residual_multiplier", "logits_scaling", ORIGINAL,
    "quantization_config",
]  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_a_field_of_any_wrong_type_is_one_located_error(family: Family) -> None:
    good = {
        "architectures": list(family.architectures), "hidden_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8,
        "intermediate_size": 64, "vocab_size": 100, "max_position_embeddings": 64,
    }  # fmt: skip
    for name in FIELDS:
        for value in WRONG + (WRONG_ROPE if name.startswith("rope_") else []):
            fields = Fields({**good, name: value}, "a/config.json")
            try:
                family_of_config(fields).config(fields)
                said = None  # another value, or one that the family does not read
            except (ValueError, NotImplementedError) as error:
                said = str(error)
            assert said is None or said.startswith("a/config.json: "), (name, value, said)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("architectures", value) for value in (5, "LlamaForCausalLM", [5], {})),
        *(("hidden_act", value) for value in ([], {}, 5)),
        *(("rope_scaling", value) for value in (5, [], "x", {"rope_type": []})),
        *((size, value) for size in SIZES for value in (None, "x", [2], 2.0, True, 10**12)),
        ("num_hidden_layers", 10**6),
        ("rms_norm_eps", 10**400),
    ],
)
def test_the_error_names_the_field_and_the_file(name: str, value: Any, tmp_path: Path) -> None:
    config = {"architectures": ["LlamaForCausalLM"], **hugging_face.SMALL, name: value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=rf"config\.json: {name}") as caught:
        load_model(str(tmp_path), random_weights=True)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 2**30, "head_dim": 8}, r"a model of 3 layers, hidden size 1073741824 .*"),
        ({"vocab_size": 2**31 - 1, "hidden_size": 2**16}, "a model of .* vocabulary size 2147"),
        ({"max_position_embeddings": 2**31 - 1, "head_dim": 2**20}, "a context of 2147483647 pos"),
        ({"num_hidden_layers": 10_000, "hidden_size": 2**20}, "a model of 10000 layers"),
    ],
)
def test_sizes_beyond_all_memory_are_refused_before_any_is_taken(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = {"architectures": ["LlamaForCausalLM"], **hugging_face.SMALL, **changes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for random_weights in (True, False):
        with pytest.raises(ValueError, match=rf"{tmp_path}: {message}.* needs \d+ bytes of memory"):
            load_model(str(tmp_path), random_weights=random_weights, dtype=torch.float32)


def test_experts_without_number_are_not_listed(tmp_path: Path) -> None:
    config = {
        "architectures": ["MixtralForCausalLM"], **hugging_face.SMALL,
        "num_local_experts": 10_000, "num_hidden_layers": 10_000, "intermediate_size": 2**20,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"10000 layers.* needs \d+ bytes of memory"):
        load_model(str(tmp_path))
