"""Logits of every family equal transformers' on random models, however the tokens arrive."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rooftile.models.families import FAMILIES
from rooftile.models.loader import LoadedModel, load_model
from tests.models import hugging_face
from tests.models.paged import PagedRunner

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.5, 2.0, 3.0],
    "long_factor": [1.5, 3.0, 6.0, 12.0],
}
GEMMA = {
    "head_dim": 8,
    "sliding_window": 6,
    "query_pre_attn_scalar": 5,
    "pad_token_id": 0,
}
PHI = {"pad_token_id": 0, "eos_token_id": 1}
LONG = {
    "rope_parameters": {**LONG_ROPE, "original_max_position_embeddings": 32},
    "original_max_position_embeddings": 32,
}
GRANITE = {
    "embedding_multiplier": 7.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.3,
    "logits_scaling": 0.5,
}
QWEN3_MOE = {
    "head_dim": 8,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied, one kv head": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "llama own head_dim, biases": (
        "llama",
        {"head_dim": 12, "attention_bias": True, "mlp_bias": True},
    ),
    "llama gelu": ("llama", {"hidden_act": "gelu"}),
    "llama gelu tanh": ("llama", {"hidden_act": "gelu_pytorch_tanh", "rms_norm_eps": 1e-3}),
    "llama 3": ("llama", {"rope_parameters": LLAMA3}),
    "llama linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0}},
    ),
    "llama yarn": ("llama", {"rope_parameters": YARN}),
    "llama dynamic": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
    ),
    "mistral window 6": ("mistral", {"sliding_window": 6}),
    "mistral window 1": ("mistral", {"sliding_window": 1, "head_dim": 10}),
    "mistral without": ("mistral", {"sliding_window": None}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3 tied, biases": (
        "qwen3",
        {"head_dim": 8, "tie_word_embeddings": True, "attention_bias": True},
    ),
    "qwen2": ("qwen2", {}),
    "qwen2 tied, windows in the upper layers": (
        "qwen2",
        {
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 1,
        },
    ),
    "gemma2": ("gemma2", GEMMA),
    "gemma2 low caps, biases": (
        "gemma2",
        GEMMA
        | {
            "attn_logit_softcapping": 0.5,
            "final_logit_softcapping": 2.0,
            "attention_bias": True,
            "hidden_activation": "gelu",
        },
    ),
    "gemma3": ("gemma3_text", GEMMA | {"num_hidden_layers": 7}),
    "gemma3 linear, own layer types": (
        "gemma3_text",
        GEMMA
        | {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e4},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "final_logit_softcapping": 3.0,
        },
    ),
    "phi3": ("phi3", PHI | {"num_key_value_heads": 4}),
    "phi3 window, partial rotary": (
        "phi3",
        PHI
        | {
            "sliding_window": 6,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    "phi3 longrope, long": ("phi3", PHI | LONG),
    "olmo2": ("olmo2", {"pad_token_id": 0, "eos_token_id": 1}),
    "olmo2 all heads, biases": (
        "olmo2",
        {
            "num_key_value_heads": 4,
            "attention_bias": True,
            "pad_token_id": 0,
            "eos_token_id": 1,
        },
    ),
    "granite": ("granite", GRANITE),
    "granite tied, biases": (
        "granite",
        GRANITE | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "mixtral": ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "mixtral window, one expert each": (
        "mixtral",
        {"num_local_experts": 3, "num_experts_per_tok": 1, "sliding_window": 6},
    ),
    "qwen3 moe": ("qwen3_moe", QWEN3_MOE),
    "qwen3 moe renormalised, dense layers, window": (
        "qwen3_moe",
        QWEN3_MOE
        | {
            "norm_topk_prob": True,
            "mlp_only_layers": [2],
            "decoder_sparse_step": 2,
            "use_sliding_window": True,
            "sliding_window": 5,
        },
    ),
    "diffllama": ("diffllama", {"head_dim": 8}),
    "diffllama own head_dim, biases, four kv heads": (
        "diffllama",
        {
            "head_dim": 12,
            "attention_bias": True,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
        },
    ),
    "diffllama all heads": ("diffllama", {"head_dim": 6, "num_key_value_heads": 4}),
    "qwen3 windows in the upper layers": (
        "qwen3",
        {"head_dim": 8, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
}
TOKENS = torch.randint(0, 67, (37,), generator=torch.Generator().manual_seed(3)).tolist()


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module", params=CASES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(ours, transformers' logits [tokens, vocab] of TOKENS)."""
    model_type, options = CASES[request.param]
    model = hugging_face.random_model(model_type, **options)
    directory = tmp_path_factory.mktemp("model")
    hugging_face.save(model, directory)
    loaded = load_model(str(directory), dtype=torch.float32)
    return loaded, hugging_face.logits(model, TOKENS)


def test_whole_prefill(pair: tuple[LoadedModel, Tensor]) -> None:
    loaded, expected = pair
    assert expected.std() > 0.3, "the oracle's logits must not be all alike"
    assert_close(PagedRunner(loaded.decoder).run((0, TOKENS))[0], expected)


def test_token_by_token(pair: tuple[LoadedModel, Tensor]) -> None:
    loaded, expected = pair
    runner = PagedRunner(loaded.decoder)
    assert_close(torch.cat([runner.run((0, [token]))[0] for token in TOKENS]), expected)


@pytest.mark.parametrize("page_size", [1, 8])
def test_in_chunks_beside_another_sequence(
    pair: tuple[LoadedModel, Tensor], page_size: int
) -> None:
    loaded, expected = pair
    runner = PagedRunner(loaded.decoder, page_size, pages_per_sequence=40)
    parts, start = [], 0
    for size in (5, 1, 13, 2, 16):
        mine = (0, TOKENS[start : start + size])
        other = (1, [start % 67] * (3 if start else 9))
        parts.append(runner.run(other, mine)[1])
        start += size
    assert start == len(TOKENS)
    assert_close(torch.cat(parts), expected)


def test_on_top_of_a_prefix_that_another_sequence_computed(
    pair: tuple[LoadedModel, Tensor],
) -> None:
    loaded, expected = pair
    runner = PagedRunner(loaded.decoder)
    runner.run((0, [*TOKENS[:16], 5, 6, 7]))
    runner.share_prefix(0, 1, 16)
    assert_close(runner.run((1, TOKENS[16:]))[0], expected[16:])


def test_kv_specs_say_what_each_layer_keeps(tmp_path: Path) -> None:
    model = hugging_face.random_model("qwen3", **CASES["qwen3 windows in the upper layers"][1])
    hugging_face.save(model, tmp_path)
    specs = load_model(str(tmp_path), dtype=torch.float32).decoder.kv_specs
    assert [(spec.heads, spec.k_dim, spec.v_dim, spec.window) for spec in specs] == [
        (2, 8, 8, None),
        (2, 8, 8, 4),
        (2, 8, 8, 4),
    ]
    assert {spec.dtype for spec in specs} == {torch.float32}


def test_the_older_spelling_of_rope_scaling(tmp_path: Path) -> None:
    model = hugging_face.random_model("llama", rope_parameters=LLAMA3)
    hugging_face.save(model, tmp_path)
    scaling = {"type" if name == "rope_type" else name: value for name, value in LLAMA3.items()}
    theta = scaling.pop("rope_theta")
    hugging_face.edit_config(
        tmp_path, rope_parameters=..., rope_theta=theta, rope_scaling=scaling, architectures=...
    )
    loaded = load_model(str(tmp_path), dtype=torch.float32)
    assert_close(
        PagedRunner(loaded.decoder).run((0, TOKENS))[0], hugging_face.logits(model, TOKENS)
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*LlamaForCausalLM"),
        ({"architectures": None, "model_type": "falcon"}, "model_type 'falcon'.*Qwen3ForCausalLM"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'; supported are silu"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters: rope_type 'longrope'"),
        (
            {"rope_scaling": {"rope_type": "linear"}},
            "rope_scaling: rope_type 'linear' needs.*factor",
        ),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config is"),
        ({"num_local_experts": 8}, "num_local_experts is 8"),
        ({"num_attention_heads": "four"}, "num_attention_heads is 'four'; expected one integer"),
        ({"num_key_value_heads": 3}, "num_heads = 4 is not a multiple of num_kv_heads = 3"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"rms_norm_eps": -1}, "rms_norm_eps is -1; expected a positive number"),
        ({"attention_bias": "yes"}, "attention_bias is 'yes'; expected true or false"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5"),
    ],
)
def test_llama_fields_that_are_refused(
    llama_directory: Path, changes: dict[str, Any], message: str
) -> None:
    hugging_face.edit_config(llama_directory, **changes)
    with pytest.raises((ValueError, NotImplementedError), match=message):
        load_model(str(llama_directory), random_weights=True)


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("mistral", {"attention_bias": True}, "attention_bias is True, which is not supported"),
        ("mistral", {"layer_types": ["full_attention"] * 3}, "layer_types is"),
        ("mistral", {"sliding_window": 0}, "sliding_window is 0"),
        ("qwen3", {"layer_types": ["chunked_attention"] * 3}, "layer_types holds 'chunked_att"),
        ("qwen3", {"layer_types": ["full_attention"]}, "expected a list of 3 names"),
        (
            "qwen2",
            {"layer_types": ["linear_attention"] * 3},
            "layer_types holds 'linear_attention'",
        ),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ("gemma2", {"hidden_activation": "relu"}, "hidden_activation is 'relu'; supported are"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0; expected a positive"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0, which"),
        (
            "phi3",
            {"rope_parameters": LONG_ROPE | {"long_factor": [1.0]}},
            "long_factor holds 1 num",
        ),
        ("olmo2", {"sliding_window": 4096}, "sliding_window is 4096, which is not supported"),
        ("granite", {"residual_multiplier": -1}, "residual_multiplier is -1; expected a positive"),
        ("llama", {"residual_multiplier": 0.5}, "residual_multiplier is 0.5, which is not suppor"),
        ("llama", {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0, which"),
        ("mixtral", {"num_experts_per_tok": 9}, "config.json: MoeSpec: top_k is 9; it must be at"),
        ("qwen3_moe", {"num_local_experts": 0}, "num_local_experts is 0; expected one integer"),
    ],
)
def test_fields_of_other_families_that_are_refused(
    tmp_path: Path, model_type: str, changes: dict[str, Any], message: str
) -> None:
    from transformers import AutoConfig

    AutoConfig.for_model(model_type, **hugging_face.SMALL).save_pretrained(tmp_path)
    name = next(f.architectures[0] for f in FAMILIES if f.model_type == model_type)
    hugging_face.edit_config(tmp_path, architectures=[name], **changes)
    with pytest.raises(ValueError, match=message):
        load_model(str(tmp_path), random_weights=True)


@pytest.fixture
def llama_directory(tmp_path: Path) -> Path:
    from transformers import AutoConfig

    AutoConfig.for_model("llama", **hugging_face.SMALL).save_pretrained(tmp_path)
    hugging_face.edit_config(tmp_path, architectures=["LlamaForCausalLM"])
    return tmp_path


def test_the_first_mistral_has_its_window_by_default(llama_directory: Path) -> None:
    hugging_face.edit_config(llama_directory, architectures=["MistralForCausalLM"])
    for change, window in ((..., 4095), (None, None), (7, 6)):
        hugging_face.edit_config(llama_directory, sliding_window=change)
        config = load_model(str(llama_directory), random_weights=True).config
        assert {layer.attention.window for layer in config.layers} == {window}


@pytest.mark.parametrize("length", [32, 33])
def test_longrope_goes_by_the_length_of_the_engine(length: int, tmp_path: Path) -> None:
    """Short divisors where no sequence can outgrow the original context, else long ones for all."""
    model = hugging_face.random_model("phi3", **PHI, **LONG)
    hugging_face.save(model, tmp_path)
    runner = PagedRunner(
        load_model(str(tmp_path), dtype=torch.float32, max_model_len=length).decoder
    )
    expected = hugging_face.logits(model, TOKENS[:length])
    assert_close(torch.cat([runner.run((0, [token]))[0] for token in TOKENS[:length]]), expected)


@pytest.mark.parametrize("spelling", ["su", "yarn"])
def test_older_names_of_longrope(spelling: str, tmp_path: Path) -> None:
    model = hugging_face.random_model("phi3", **PHI, **LONG)
    hugging_face.save(model, tmp_path)
    scaling = {
        "type": spelling,
        **{name: LONG_ROPE[name] for name in ("short_factor", "long_factor")},
    }
    hugging_face.edit_config(
        tmp_path, rope_parameters=..., rope_theta=10000.0, rope_scaling=scaling
    )
    loaded = load_model(str(tmp_path), dtype=torch.float32)
    assert_close(
        PagedRunner(loaded.decoder).run((0, TOKENS))[0], hugging_face.logits(model, TOKENS)
    )


def test_the_older_spelling_of_gemma_3(tmp_path: Path) -> None:
    full = {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e4}
    sliding = {"rope_type": "default", "rope_theta": 100.0}
    options = {
        "num_hidden_layers": 4,
        "rope_parameters": {"full_attention": full, "sliding_attention": sliding},
        "sliding_window_pattern": 3,
    }
    model = hugging_face.random_model("gemma3_text", **GEMMA, **options)
    hugging_face.save(model, tmp_path)
    hugging_face.edit_config(
        tmp_path,
        rope_parameters=...,
        layer_types=...,
        sliding_window_pattern=3,
        rope_theta=5e4,
        rope_local_base_freq=100.0,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )
    loaded = load_model(str(tmp_path), dtype=torch.float32)
    assert_close(
        PagedRunner(loaded.decoder).run((0, TOKENS))[0], hugging_face.logits(model, TOKENS)
    )


def test_gemma_keeps_its_keys_in_two_groups(tmp_path: Path) -> None:
    hugging_face.save(hugging_face.random_model("gemma2", **GEMMA), tmp_path)
    decoder = load_model(str(tmp_path), dtype=torch.float32).decoder
    assert [spec.window for spec in decoder.kv_specs] == [5, None, 5]
    assert len(PagedRunner(decoder).groups) == 2


@pytest.mark.parametrize("model_type", ["gemma2", "gemma3_text", "granite", "mixtral", "olmo2"])
def test_bfloat16_is_close(model_type: str, tmp_path: Path) -> None:
    """Norm weights near 0 with an offset, multipliers, sums of experts: rounded as they should be."""
    options = next(options for kind, options in CASES.values() if kind == model_type)
    model = hugging_face.random_model(model_type, **options)
    hugging_face.save(model, tmp_path)
    loaded = load_model(str(tmp_path), dtype=torch.bfloat16)
    actual = PagedRunner(loaded.decoder).run((0, TOKENS))[0]
    expected = hugging_face.logits(model, TOKENS)
    theirs = hugging_face.logits(model.to(torch.bfloat16), TOKENS).float()
    assert actual.dtype == torch.float32
    # Each row as close as transformers' own bfloat16, up to its luck (a token may change experts).
    error, allowed = (actual - expected).norm(dim=1), (theirs - expected).norm(dim=1)
    assert float(error.median()) < 1.5 * float(allowed.median())


@pytest.mark.parametrize("model_type", sorted({kind for kind, _ in CASES.values()}))
def test_random_weights_of_every_family(model_type: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    options = next(options for kind, options in CASES.values() if kind == model_type)
    config = AutoConfig.for_model(model_type, **{**hugging_face.SMALL, **options})
    config.architectures = [
        next(f.architectures[0] for f in FAMILIES if f.model_type == model_type)
    ]
    config.save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), random_weights=True, dtype=torch.float32)
    norm = loaded.decoder.norm
    assert torch.equal(norm.weight + norm.offset, torch.ones(32)), "norms multiply by 1"
    logits = PagedRunner(loaded.decoder).run((0, TOKENS))[0]
    assert bool(logits.isfinite().all())
    assert float(logits.std()) > 1e-4
