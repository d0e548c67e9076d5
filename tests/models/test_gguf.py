"""GGUF files: every quantisation through the whole load, metadata, and all that can be damaged."""

from __future__ import annotations

import contextlib
import math
import struct
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from hypothesis import given
from hypothesis import strategies as st

from rooftile.models.gguf import read_gguf
from rooftile.models.loader import load_model
from tests.models import gguf_files, hugging_face
from tests.models.paged import PagedRunner

TOKENS = [1, 9, 33, 4, 60, 2, 2, 18]
GEMMA = {"head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8, "pad_token_id": 0}
PARTIAL = {
    "pad_token_id": 0,
    "eos_token_id": 1,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 500.0,
        "partial_rotary_factor": 0.5,
    },
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
# Whole blocks of 256 for the K-quants.
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "head_dim": 64}
# All that the gguf package can dequantise; a newer one may know more.
TYPES = sorted({"F32", "F16", *(kind.name for kind in gguf.quants._type_traits)})
EXPECTED = {
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K"),
    *("Q5_K", "Q6_K", "TQ1_0", "TQ2_0", "MXFP4", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS"),
    *("IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"),
}


def assert_equals(path: Path, model: Any) -> None:
    loaded = load_model(str(path), dtype=torch.float32)
    torch.testing.assert_close(
        PagedRunner(loaded.decoder).run((0, TOKENS))[0],
        hugging_face.logits(model, TOKENS),
        rtol=1e-4,
        atol=1e-4,
    )


def test_the_types_of_the_documentation_are_among_them() -> None:
    assert EXPECTED.issubset(TYPES)


@pytest.mark.parametrize("kind", TYPES)
def test_every_type_loads_as_what_it_stands_for(kind: str, tmp_path: Path) -> None:
    model = hugging_face.random_model("llama", **WIDE)
    path = tmp_path / "model.gguf"
    gguf_files.write(path, model, GGMLQuantizationType[kind])
    assert_equals(path, model)


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 1, "head_dim": 12}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("mistral", {"sliding_window": None}),
        ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 16}),
        ("qwen3_moe", QWEN3_MOE | {"norm_topk_prob": True}),
        ("gemma2", GEMMA),
        ("gemma3_text", GEMMA | {"num_hidden_layers": 7}),
        ("phi3", {"pad_token_id": 0, "eos_token_id": 1}),
        ("phi3", PARTIAL),
        ("olmo2", {"pad_token_id": 0, "eos_token_id": 1}),
        ("granite", GRANITE),
    ],
)
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_families(model_type: str, options: dict[str, Any], kind: str, tmp_path: Path) -> None:
    if kind == "Q8_0":  # rows of whole blocks
        options = {**options, "hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
        if model_type == "qwen3_moe":
            options["moe_intermediate_size"] = 32
        if "query_pre_attn_scalar" in options:
            options["query_pre_attn_scalar"] = 32
        if model_type in ("phi3", "olmo2", "granite"):
            del options["head_dim"]
    model = hugging_face.random_model(model_type, **options)
    gguf_files.write(tmp_path / "model.gguf", model, GGMLQuantizationType[kind])
    assert_equals(tmp_path / "model.gguf", model)


def test_gemma_says_what_its_metadata_can(tmp_path: Path) -> None:
    """Linear scaling of the global layers, which layers have windows, their base."""
    parameters = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e4},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    }
    kinds = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    options = GEMMA | {"rope_parameters": parameters, "layer_types": kinds, "num_hidden_layers": 4}
    model = hugging_face.random_model("gemma3_text", **options)
    metadata = {
        "rope.scaling.type": "linear",
        "rope.scaling.factor": 8.0,
        "rope.freq_base_swa": 100.0,
        "attention.sliding_window_pattern": [False, True, True, False],
    }
    path = tmp_path / "model.gguf"
    gguf_files.write(path, model, metadata=metadata)
    assert_equals(path, model)
    gguf_files.write(path, model, metadata={"attention.sliding_window_pattern": [True, False]})
    with pytest.raises(ValueError, match=r"sliding_window_pattern is \[True, False\]; expected 4"):
        load_model(str(path))


def test_the_first_files_of_gemma_2_lack_what_all_its_models_share(tmp_path: Path) -> None:
    options = GEMMA | {"sliding_window": 4096}
    model = hugging_face.random_model("gemma2", **options)
    absent = dict.fromkeys(
        ("attn_logit_softcapping", "final_logit_softcapping", "attention.sliding_window")
    )
    gguf_files.write(tmp_path / "model.gguf", model, metadata=absent)
    assert_equals(tmp_path / "model.gguf", model)
    specs = load_model(str(tmp_path / "model.gguf")).decoder.kv_specs
    assert [spec.window for spec in specs] == [4095, None, 4095]


def test_the_largest_gemma_scales_queries_by_its_width(tmp_path: Path) -> None:
    """27B: hidden / heads, not head_dim; the file does not say so, the number of layers does."""
    options = GEMMA | {"query_pre_attn_scalar": 16, "hidden_size": 64, "num_hidden_layers": 46}
    model = hugging_face.random_model("gemma2", **options)
    gguf_files.write(tmp_path / "model.gguf", model)
    assert_equals(tmp_path / "model.gguf", model)


@pytest.mark.parametrize("length", [32, 64])
def test_phi_3_keeps_the_divisors_of_longrope_in_tensors(length: int, tmp_path: Path) -> None:
    short, long = [1.0, 1.5, 2.0, 3.0], [1.5, 3.0, 6.0, 12.0]
    parameters = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": short,
        "long_factor": long,
        "original_max_position_embeddings": 32,
    }
    options = {"pad_token_id": 0, "eos_token_id": 1, "original_max_position_embeddings": 32}
    model = hugging_face.random_model("phi3", rope_parameters=parameters, **options)
    path = tmp_path / "model.gguf"
    extra = {
        f"rope_factors_{name}.weight": np.array(values, np.float32)
        for name, values in (("short", short), ("long", long))
    }
    metadata: dict[str, Any] = {"rope.scaling.original_context_length": 32}
    for more in ({}, {"rope.scaling.attn_factor": (1 + math.log(4) / math.log(32)) ** 0.5}):
        gguf_files.write(path, model, metadata=metadata | more, extra=extra)
        tokens = [token % 67 for token in range(3, 3 + 7 * length, 7)]
        loaded = load_model(str(path), dtype=torch.float32, max_model_len=length)
        torch.testing.assert_close(
            PagedRunner(loaded.decoder).run((0, tokens))[0],
            hugging_face.logits(model, tokens),
            rtol=1e-4,
            atol=1e-4,
        )
    extra["rope_factors_long.weight"] = np.ones(3, np.float32)
    gguf_files.write(path, model, metadata=metadata, extra=extra)
    with pytest.raises(ValueError, match=r"model\.gguf: .*long_factor holds 3 numbers; dim = 8"):
        load_model(str(path))


def test_rotary_scaling(tmp_path: Path) -> None:
    linear = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    model = hugging_face.random_model("llama", rope_parameters=linear)
    scaling: dict[str, Any] = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    gguf_files.write(tmp_path / "linear.gguf", model, metadata=scaling)
    assert_equals(tmp_path / "linear.gguf", model)

    yarn = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "rope_theta": 10000.0,
    }
    model = hugging_face.random_model("qwen3", rope_parameters=yarn, head_dim=16)
    scaling = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 32,
    }
    gguf_files.write(tmp_path / "yarn.gguf", model, metadata=scaling)
    assert_equals(tmp_path / "yarn.gguf", model)

    gguf_files.write(tmp_path / "longrope.gguf", model, metadata={"rope.scaling.type": "longrope"})
    with pytest.raises(ValueError, match=r"qwen3\.rope\.scaling\.type is 'longrope'; supported"):
        load_model(str(tmp_path / "longrope.gguf"))


def test_llama_3_keeps_the_divisors_of_its_frequencies_in_a_tensor(tmp_path: Path) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    model = hugging_face.random_model("llama", rope_parameters=parameters, head_dim=32)
    scaled = ROPE_INIT_FUNCTIONS["llama3"](model.config, "cpu")[0].numpy()
    plain = 500000.0 ** -(np.arange(0, 32, 2, dtype=np.float64) / 32)
    divisors = (plain / scaled).astype(np.float32)
    path = tmp_path / "model.gguf"
    gguf_files.write(path, model, extra={"rope_freqs.weight": divisors})
    assert_equals(path, model)
    gguf_files.write(path, model, extra={"rope_freqs.weight": divisors**2})
    with pytest.raises(ValueError, match=r"rope_freqs\.weight does not follow from Llama 3's"):
        load_model(str(path))


def test_a_window_in_the_metadata(tmp_path: Path) -> None:
    model = hugging_face.random_model("mistral", sliding_window=3)
    gguf_files.write(tmp_path / "m.gguf", model, metadata={"attention.sliding_window": 3})
    assert_equals(tmp_path / "m.gguf", model)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"expert_count": 8}, "llama.expert_used_count is missing"),
        ({"expert_count": 2, "expert_used_count": 3}, r"model\.gguf: MoeSpec: top_k is 3; it must"),
        (
            {"expert_count": 2, "expert_shared_count": 1},
            "expert_shared_count is 1, which is not su",
        ),
        ({"attention.value_length": 4}, "attention.value_length is 4; only 8, the key_length"),
        ({"block_count": 0}, "llama.block_count is 0"),
        ({"context_length": None}, "llama.context_length is missing"),
        ({"attention.head_count_kv": [1, 2, 2]}, r"head_count_kv is \[1, 2, 2\]; expected one"),
        ({"logit_scale": 0.5}, "llama.logit_scale is 0.5; scales are not supported for"),
        ({"split.count": 3}, "one part of 3; merge the parts"),
    ],
)
def test_metadata_that_is_refused(metadata: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    gguf_files.write(path, hugging_face.random_model("llama"), metadata=metadata)
    with pytest.raises(ValueError, match=message):
        load_model(str(path))


def test_unknown_architectures_and_types_are_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    gguf_files.write(path, hugging_face.random_model("llama", **WIDE), GGMLQuantizationType.Q8_0)
    content = path.read_bytes()
    path.write_bytes(content.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0bloom", 1))
    with pytest.raises(
        ValueError, match=r"general\.architecture 'bloom'.*supported are llama, qwen2"
    ):
        load_model(str(path))

    def with_type(number: int) -> None:
        name = b"blk.0.ffn_down.weight"
        at = content.index(name) + len(name) + 4 + 2 * 8
        assert content[at : at + 4] == struct.pack("<I", GGMLQuantizationType.Q8_0)
        path.write_bytes(content[:at] + struct.pack("<I", number) + content[at + 4 :])

    with_type(250)
    with pytest.raises(
        ValueError, match=r"'blk\.0\.ffn_down\.weight' has type 250, which the inst"
    ):
        load_model(str(path))
    with_type(GGMLQuantizationType.Q8_K)
    with pytest.raises(
        ValueError, match=r"cannot be dequantised: blk\.0\.ffn_down\.weight \(Q8_K\)"
    ):
        load_model(str(path))
    with_type(GGMLQuantizationType.I8)
    with pytest.raises(ValueError, match=r"cannot be dequantised: blk\.0\.ffn_down\.weight \(I8\)"):
        load_model(str(path))


def test_one_error_lists_all_that_does_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    extra = {"blk.7.attn_q.weight": np.zeros((4, 4), np.float32)}
    gguf_files.write(
        path,
        hugging_face.random_model("llama"),
        extra=extra,
        metadata={"block_count": 4, "feed_forward_length": 40},
    )
    with pytest.raises(ValueError, match="do not fit the model") as caught:
        load_model(str(path))
    message = str(caught.value)
    assert "9 missing: blk.3.attn_q.weight" in message
    assert "1 unexpected: blk.7.attn_q.weight" in message
    assert "blk.0.ffn_down.weight is [32, 48], expected [32, 40]" in message


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    tokens = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a", "b", "ab"]}
    model = hugging_face.random_model("llama", num_hidden_layers=1)
    gguf_files.write(path, model, metadata=tokens)
    return path.read_bytes()


@pytest.mark.parametrize(
    ("start", "new", "message"),
    [
        (0, b"GGML", "starts with b'GGML', not b'GGUF'"),
        (4, struct.pack("<I", 1), "GGUF version 1; this reader knows"),
        (4, struct.pack(">I", 3), r"version 50331648 \(a big-endian file\)"),
        (8, struct.pack("<Q", 2**60), f"the tensor count is {2**60}, more than fits"),
        (16, struct.pack("<Q", 2**40), f"the metadata count is {2**40}, more than fits"),
        (24, struct.pack("<Q", 2**63), "the name of metadata field 0 needs 9223372036854775808"),
    ],
)
def test_damaged_headers(
    content: bytes, start: int, new: bytes, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content[:start] + new + content[start + len(new) :])
    with pytest.raises(ValueError, match=message) as caught:
        read_gguf(path)
    assert str(path) in str(caught.value)


def test_damage_further_in(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"

    def damaged(after: bytes, skip: int, new: bytes) -> None:
        at = content.index(after) + len(after) + skip
        path.write_bytes(content[:at] + new + content[at + len(new) :])

    # Key, type (array), type of elements (string), count, first string's length.
    damaged(b"tokenizer.ggml.tokens", 8, struct.pack("<Q", 10**9))
    with pytest.raises(ValueError, match=r"length of 'tokenizer\.ggml\.tokens' is 1000000000"):
        read_gguf(path)
    damaged(b"tokenizer.ggml.tokens", 16, struct.pack("<Q", 2**62))
    with pytest.raises(
        ValueError, match=r"string 0 of 'tokenizer\.ggml\.tokens' runs past the end"
    ):
        read_gguf(path)
    damaged(b"tokenizer.ggml.tokens", 24, b"\xff")
    with pytest.raises(ValueError, match="string 0 of 'tokenizer.ggml.tokens' is not valid UTF-8"):
        read_gguf(path)
    damaged(b"tokenizer.ggml.tokens", 4, struct.pack("<I", 9))
    with pytest.raises(ValueError, match="array of unsupported type 9"):
        read_gguf(path)
    damaged(b"llama.block_count", 0, struct.pack("<I", 77))
    with pytest.raises(ValueError, match="'llama.block_count' has unknown type 77"):
        read_gguf(path)
    damaged(b"blk.0.attn_q.weight", 0, struct.pack("<I", 9))
    with pytest.raises(ValueError, match=r"'blk\.0\.attn_q\.weight' has 9 dimensions"):
        read_gguf(path)
    damaged(b"blk.0.attn_q.weight", 4, struct.pack("<Q", 2**61))
    with pytest.raises(
        ValueError, match=r"'blk\.0\.attn_q\.weight' ends at byte \d+, but the file"
    ):
        read_gguf(path)
    damaged(b"blk.0.attn_q.weight", 4 + 16 + 4, struct.pack("<Q", 2**50))
    with pytest.raises(
        ValueError, match=r"'blk\.0\.attn_q\.weight' ends at byte \d+, but the file"
    ):
        read_gguf(path)


@given(share=st.floats(0, 0.999))
def test_a_truncated_file_is_always_noticed(content: bytes, share: float) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model.gguf"
        path.write_bytes(content[: int(share * len(content))])
        with pytest.raises(ValueError, match=r"model\.gguf"):
            read_gguf(path)


@given(position=st.integers(0, 10**9), byte=st.integers(0, 255))
def test_a_damaged_byte_raises_nothing_but_value_errors(
    content: bytes, position: int, byte: int
) -> None:
    changed = bytearray(content)
    changed[position % 2500] = byte  # the header and the table of tensors
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model.gguf"
        path.write_bytes(changed)
        with contextlib.suppress(ValueError):
            read_gguf(path)


def test_the_sampling_that_it_recommends(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    model = hugging_face.random_model("llama")
    sampling = {"general.sampling.temp": 0.6, "general.sampling.top_k": 20}
    gguf_files.write(path, model, metadata=sampling)
    assert load_model(path).sampling_defaults == {"temperature": 0.6, "top_k": 20}
    assert load_model(path, generation_config=False).sampling_defaults == {}
