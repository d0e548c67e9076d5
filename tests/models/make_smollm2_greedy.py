"""Recomputes smollm2_greedy.json with transformers: python -m tests.models.make_smollm2_greedy

Greedy text of the demo model, loaded by transformers from the same GGUF file, in float32. Takes a
minute. tests/models/test_demo.py compares ours with it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rooftile.models.resolve import resolve

FILE = Path(__file__).with_name("smollm2_greedy.json")
NEW_TOKENS = 24
CHAT = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "Why is the sky blue?",
)
PROMPTS = (
    "The history of the city begins in the early Middle Ages, when",
    "Once upon a time, in a small village by the sea, there lived",
    "To make a good cup of tea, you should first",
    "The three most important inventions of the nineteenth century were",
    "She opened the door slowly and saw that",
    "In economics, inflation is usually defined as",
    "Dear Sir or Madam,\n\nI am writing to complain about",
    "The difference between weather and climate is that",
    "def fibonacci(n):\n    # Return the n-th Fibonacci number.\n",
    "Photosynthesis is the process by which plants",
    "My grandmother used to say that patience is",
    "The train from Berlin was late again, so we decided to",
    "According to the second law of thermodynamics,",
    "A healthy breakfast might include",
    "The old lighthouse keeper had not spoken to anyone for",
    "Water boils at a lower temperature on a mountain because",
    "\"I don't think that's a good idea,\" he said, and",
)


def token_ids(tokenizer: Any, chat: Sequence[str], prompts: Sequence[str]) -> list[list[int]]:
    chats = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in chat
    ]
    return chats + [tokenizer.encode(text) for text in prompts]


def compute() -> list[dict[str, Any]]:
    return compute_greedy(resolve("demo").path, CHAT, PROMPTS)


def compute_greedy(path: Path, chat: Sequence[str], prompts: Sequence[str]) -> list[dict[str, Any]]:
    """Rows of a fixture: what transformers makes of the GGUF file `path`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.float32
    ).eval()
    rows = []
    texts = (*chat, *prompts)
    for text, ids in zip(texts, token_ids(tokenizer, chat, prompts), strict=True):
        with torch.inference_mode():
            output = model.generate(
                torch.tensor([ids]), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0
            )
        new = output[0, len(ids) :].tolist()
        rows.append(
            {
                "prompt": text,
                "chat": text in chat,
                "prompt_token_ids": ids,
                "token_ids": new,
                "text": tokenizer.decode(new, skip_special_tokens=True),
            }
        )
    return rows


if __name__ == "__main__":
    FILE.write_text(json.dumps(compute(), indent=1, ensure_ascii=False) + "\n")
