"""lm-eval's local-completions against the server, on a small task of our own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rooftile.engine.llm import LLM
from rooftile.engine.params import SamplingParams
from tests.server.live import LiveServer

TASK = """\
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
{more}
"""
CHOICE = """\
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list:
  - metric: acc
"""
PERPLEXITY = """\
doc_to_target: "{{question}}"
metric_list:
  - metric: word_perplexity
"""


@pytest.mark.slow
def test_lm_eval(
    make_server: Callable[..., LiveServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm_eval = pytest.importorskip("lm_eval", reason="lm-eval (a large package) is not installed")
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    server = make_server()
    tokenizer = server.llm.tokenizer
    assert tokenizer is not None
    documents = [
        {"question": f"Question {n}:", "choices": [f"yes {n}", "no", "perhaps é"], "answer": n % 3}
        for n in range(6)
    ]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in documents))
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    (tasks / "choice.yaml").write_text(
        TASK.format(name="tiny_choice", data=data, kind="multiple_choice", more=CHOICE)
    )
    (tasks / "perplexity.yaml").write_text(
        TASK.format(
            name="tiny_perplexity", data=data, kind="loglikelihood_rolling", more=PERPLEXITY
        )
    )
    result = lm_eval.simple_evaluate(
        model="local-completions",
        model_args={
            "model": "tiny", "base_url": f"{server.url}/v1/completions", "max_length": 150,
            "tokenizer": server.llm.config.model,
            "tokenized_requests": True, "num_concurrent": 4, "max_retries": 1,
        },
        tasks=["tiny_choice", "tiny_perplexity"],
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        bootstrap_iters=0,
    )  # fmt: skip
    assert result is not None
    llm = LLM(
        server.llm.config.model, dtype="float32", random_weights=True, num_pages=64,
        prefix_cache=False,
    )  # fmt: skip
    samples = result["samples"]["tiny_choice"]
    assert len(samples) == 6
    for sample in samples:
        document = sample["doc"]
        context = tokenizer.encode(document["question"])
        for choice, ((given, _),) in zip(document["choices"], sample["resps"], strict=True):
            tokens = context + tokenizer.encode(f" {choice}")
            (output,) = llm.generate([tokens], SamplingParams(prompt_logprobs=0, max_tokens=0))
            entries = (output.prompt_logprobs or [])[len(context) :]
            expected = sum(entry.logprob for entry in entries if entry is not None)
            assert float(given) == pytest.approx(expected, abs=1e-3)
    assert result["results"]["tiny_perplexity"]["word_perplexity,none"] > 1
    server.assert_idle()
