"""lm-eval's local-completions against the server, on a small task of our own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

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
    # Of two continuations the model's own greedy one is far likelier.
    client = server.openai()
    documents = []
    for number in range(6):
        question = f"Question {number}:"
        own = client.completions.create(
            model="tiny", prompt=question, max_tokens=4, temperature=0,
            extra_body={"ignore_eos": True, "bad_words": ["\ufffd"]},
            logit_bias={str(token): -100 for token in [*range(33), *range(127, 256), 256, 257, 258]},
        ).choices[0].text  # fmt: skip
        other = "~}" + own[::-1][:2]
        documents.append({"question": question, "choices": [other, own], "answer": 1})
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
    assert result["results"]["tiny_choice"]["acc,none"] >= 0.5
    assert result["results"]["tiny_perplexity"]["word_perplexity,none"] > 1
    server.assert_idle()
