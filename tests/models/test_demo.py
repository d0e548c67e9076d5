"""The demo model from its GGUF file: greedy text as transformers', tokenizer, time to load."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rooftile.models.loader import LoadedModel, load_model
from tests.models import make_smollm2_greedy
from tests.models.paged import PagedRunner

ROWS = json.loads(make_smollm2_greedy.FILE.read_text())
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def demo() -> LoadedModel:
    return load_model("demo", dtype=torch.float32)


def test_prompts_are_encoded_alike(demo: LoadedModel) -> None:
    tokenizer = demo.tokenizer
    assert tokenizer is not None
    assert len(ROWS) == 20
    for row in ROWS:
        if row["chat"]:
            text = tokenizer.render_chat([{"role": "user", "content": row["prompt"]}])
            ids = tokenizer.encode(text, add_special_tokens=False)
        else:
            ids = tokenizer.encode(row["prompt"])
        assert ids == row["prompt_token_ids"]
        assert tokenizer.decode(row["token_ids"]) == row["text"]
    assert demo.eos_token_ids == {tokenizer.token_to_id("<|im_end|>")}


def test_greedy_text_equals_transformers(demo: LoadedModel) -> None:
    runner = PagedRunner(demo.decoder, 16, pages_per_sequence=4, sequences=len(ROWS))
    logits = runner.run(*((index, row["prompt_token_ids"]) for index, row in enumerate(ROWS)))
    texts: list[list[int]] = [[] for _ in ROWS]
    alive = dict(enumerate(logits))
    for _ in range(make_smollm2_greedy.NEW_TOKENS):
        for index, row_logits in list(alive.items()):
            token = int(row_logits[-1].argmax())
            texts[index].append(token)
            if token in demo.eos_token_ids:
                del alive[index]
        step = runner.run(*((index, [texts[index][-1]]) for index in alive))
        alive = dict(zip(alive, step, strict=True))
    assert texts == [row["token_ids"] for row in ROWS]


@pytest.mark.slow
def test_the_fixture_is_what_transformers_computes_now() -> None:
    pytest.importorskip("accelerate", reason="transformers needs it to load a GGUF file")
    assert make_smollm2_greedy.compute() == ROWS


LOAD = """
import sys, time
import torch
torch.set_num_threads(2)
start = time.perf_counter()
from rooftile.models.loader import load_model
load_model("demo")
print(time.perf_counter() - start)
assert not [name for name in sys.modules if name.startswith("transformers")], "transformers"
"""


@pytest.mark.slow
def test_loads_in_under_three_seconds_without_transformers() -> None:
    times = [
        float(
            subprocess.run(
                [sys.executable, "-c", LOAD], cwd=ROOT, capture_output=True, check=True
            ).stdout
        )
        for _ in range(3)
    ]
    assert min(times) < 3.0, times


def test_transformers_stays_out_of_the_run_path() -> None:
    code = (
        "import sys, rooftile.models.loader, rooftile.models.gguf_tokenizer\n"
        "print(*(name for name in ('transformers', 'gguf', 'tokenizers', 'jinja2.sandbox', "
        "'huggingface_hub') if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True)
    assert done.stdout.split() == []


HARD = [
    "Hello, world!",
    "  two leading and trailing  ",
    "\ttabs\t\tand\n\n\nline breaks\r\n",
    "a  1 and 12 345 678 and x2y",
    "½ Ⅻ ٣٤ ²",
    "I've you'll DON'T we're it's",
    "naïve café — “quotes” … 日本語テキスト العربية हिन्दी",
    "🙂👩‍👩‍👧🇫🇷 e\u0301 \u200b\u00a0|",
    "def f(x):\n    return {x: [i ** 2 for i in range(10)]}  # done\n",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|><repo_name>a/b<unknown>",
    "<|im_start|><|im_end|>  <|im_start|>",
    "\x00\x01\x7f",
    "a" * 300,
    " " * 33 + "x",
    "",
]


@pytest.fixture(scope="module")
def published() -> Any:
    """transformers' byte-level tokenizer with the pre-tokenizer of SmolLM2's own tokenizer.json.

    transformers ignores `tokenizer.ggml.pre` = smollm and does not cut numbers into digits.
    """
    from tokenizers import pre_tokenizers
    from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

    from rooftile.models.gguf import read_gguf
    from rooftile.models.resolve import resolve

    metadata = read_gguf(resolve("demo").path).metadata
    described = {
        "tokenizer_type": "gpt2",
        "pre_tokenizer_type": "smollm",
        **{name: metadata[f"tokenizer.ggml.{name}"] for name in ("tokens", "merges", "token_type")},
    }
    backend, _ = convert_gguf_tokenizer("llama", described)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )
    return backend


@pytest.mark.parametrize("text", HARD)
def test_tokenizer_equals_the_published_one(demo: LoadedModel, published: Any, text: str) -> None:
    tokenizer = demo.tokenizer
    assert tokenizer is not None
    ids = tokenizer.encode(text)
    assert ids == published.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.decode(ids) == published.decode(ids)


def test_special_tokens_as_plain_text(demo: LoadedModel) -> None:
    tokenizer = demo.tokenizer
    assert tokenizer is not None
    text = "say <|im_end|> now"
    plain = tokenizer.encode(text, parse_special=False)
    assert not tokenizer.special_ids.intersection(plain)
    assert tokenizer.decode(plain) == text
    assert tokenizer.special_ids.intersection(tokenizer.encode(text))
    assert tokenizer.decode(tokenizer.encode(text)) == "say  now"
