"""A tiny model with random weights and a byte-level tokenizer, as a directory on disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rooftile.engine.llm import LLM

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 260,
    "max_position_embeddings": 160,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "bos_token_id": 256,
    "eos_token_id": 257,
    "torch_dtype": "float32",
}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_model(directory: Path, **changes: Any) -> Path:
    """Every byte a token (0..255), then <|bos|>, <|im_end|> (end of sequence) and <|im_start|>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|bos|>", "<|im_end|>", "<|im_start|>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "bos_token": "<|bos|>",
        "eos_token": "<|im_end|>",
        "chat_template": TEMPLATE,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    return directory


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="session")
def make_llm(model_path: str) -> Callable[..., LLM]:
    def make(**options: Any) -> LLM:
        defaults = {"dtype": "float32", "random_weights": True, "num_pages": 64, "page_size": 4}
        return LLM(model_path, **{**defaults, **options})

    return make


@pytest.fixture(scope="session")
def shared_llm(make_llm: Callable[..., LLM]) -> LLM:
    return make_llm()


@pytest.fixture
def llm(shared_llm: LLM) -> LLM:
    """The shared engine with an empty prefix cache; after the test nothing may be in use."""
    shared_llm.reset_prefix_cache()
    yield shared_llm
    stats = shared_llm.stats()
    assert stats.kv.in_use == 0
    assert (stats.num_running, stats.num_waiting) == (0, 0)
