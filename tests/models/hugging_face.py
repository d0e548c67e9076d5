"""Small random models of transformers, saved to a directory: the oracle for ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SMALL: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def random_model(model_type: str, **options: Any) -> Any:
    """A transformers model in float32 whose every parameter is random, norms and biases too."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, **{**SMALL, **options})
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    return model


def save(model: Any, directory: Path, **options: Any) -> None:
    model.save_pretrained(directory, **options)


def edit_config(directory: Path, **changes: Any) -> None:
    """Change fields of config.json; `None` as a value stays null, `...` removes the field."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config.update(changes)
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))


def logits(model: Any, tokens: list[int]) -> Tensor:
    """[tokens, vocab] of a whole prefill."""
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0]
