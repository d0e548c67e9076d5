"""`rooftile generate`: where prompts come from, what is printed, what reaches the engine."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rooftile.engine.params import BeamSearchParams, SamplingParams
from tests.cli.fakes import FakeLLM

Run = Callable[..., Any]


def test_one_prompt_prints_the_answer_alone(llm: FakeLLM, rooftile: Run) -> None:
    result = rooftile("generate", "-m", "x", "hello there")
    assert result.exit_code == 0
    assert result.stdout == "re: hello there\n"
    assert llm.conversations == [[{"role": "user", "content": "hello there"}]]


def test_several_prompts_are_told_apart(llm: FakeLLM, rooftile: Run) -> None:
    result = rooftile("generate", "-m", "x", "-n", "2", "one", "two " * 40)
    assert result.stdout.startswith(
        "=== 1/2: one\n--- answer 1 of 2\nre: one\n--- answer 2 of 2\nre: one\n\n=== 2/2: two two"
    )
    assert max(map(len, result.stdout.splitlines()[5:6])) <= 70  # a long prompt is shortened


def test_json_lines(llm: FakeLLM, rooftile: Run) -> None:
    result = rooftile("generate", "-m", "x", "--json", "--logprobs", "1", "Grüße", "b")
    first, second = (json.loads(line) for line in result.stdout.splitlines())
    assert first["prompt"] == "Grüße"
    assert "Grüße" in result.stdout  # not escaped
    assert first["prompt_tokens"] == 3
    assert first["cached_tokens"] == 1
    assert first["time_to_first_token"] == 0.25
    (answer,) = first["outputs"]
    assert answer["text"] == "re: Grüße"
    assert answer["finish_reason"] == "stop"
    assert answer["token_ids"] == [1, 2]
    assert answer["logprobs"][0]["logprob"] == -0.5
    assert second["index"] == 1


def test_standard_input_is_one_prompt(llm: FakeLLM, rooftile: Run) -> None:
    result = rooftile("generate", "-m", "x", "--raw", input="two\nlines\n")
    assert result.stdout == "re: two\nlines\n"
    assert llm.prompts == ["two\nlines"]


def test_arguments_leave_standard_input_alone(llm: FakeLLM, rooftile: Run) -> None:
    assert rooftile("generate", "-m", "x", "--raw", "a", input="b").exit_code == 0
    assert llm.prompts == ["a"]


@pytest.mark.parametrize("from_stdin", [False, True])
def test_input_has_a_prompt_per_line_as_text_or_json(
    llm: FakeLLM, rooftile: Run, tmp_path: Path, from_stdin: bool
) -> None:
    lines = 'plain\n\n{"prompt": "two\\nlines"}\n{braces, not JSON}\n'
    file = tmp_path / "prompts"
    file.write_text(lines)
    source = "-" if from_stdin else str(file)
    result = rooftile("generate", "-m", "x", "--raw", "-i", source, "first", input=lines)
    assert result.exit_code == 0
    assert llm.prompts == ["first", "plain", "two\nlines", "{braces, not JSON}"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"promt": "x"}', 'line 2: give either "prompt" or "messages"'),
        ('{"prompt": 3}', "line 2: prompt is 3; it must be a text"),
        ('{"prompt": "x", "temprature": 0}', 'line 2: there is no field "temprature"'),
        ('{"prompt": "x", "top_p": 2}', "line 2: top_p is 2"),
        ('{"prompt": "x", "width": 2}', "line 2: width belongs to beam search"),
        ('{"custom_id": "x", "url": "/v1/completions", "body": {}}', "line 2: lines of an OpenAI"),
        ('{"prompt": "x", "logprobs": 1}', "add --json, or --output"),
    ],
)
def test_a_json_line_that_cannot_run_is_named(
    llm: FakeLLM, rooftile: Run, tmp_path: Path, line: str, said: str
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'{{"prompt": "fine"}}\n{line}\n')
    result = rooftile("generate", "-m", "x", "-i", str(file))
    assert result.exit_code == 1
    assert said in result.stderr
    assert llm.options is None  # refused before a model is loaded


def test_json_lines_have_what_they_ask_for_with_and_without_output(
    llm: FakeLLM, rooftile: Run, tmp_path: Path
) -> None:
    file, target = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    lines = [
        {"id": "a", "prompt": "one", "temperature": 0, "max_tokens": 3},
        {"messages": [{"role": "user", "content": "two"}], "n": 2},
        {"prompt": [7, 8, 9], "stop": ["x"]},
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    command = ("generate", "-m", "x", "--system", "S", "-i", str(file))
    plain = rooftile(*command)
    assert plain.exit_code == 0, plain.stderr
    asked = list(zip(llm.prompts, llm.params, strict=True)), list(llm.conversations)
    assert [params.max_tokens for params in llm.params] == [3, 512, 512]
    assert "=== 1/3: one\n" in plain.stdout
    assert "=== 2/3: two\n--- answer 1 of 2\n" in plain.stdout
    assert "=== 3/3: tokens [7, 8, 9]\n" in plain.stdout
    llm.prompts, llm.params, llm.conversations = [], [], []
    records = [json.loads(line) for line in rooftile(*command, "--json").stdout.splitlines()]
    assert (list(zip(llm.prompts, llm.params, strict=True)), llm.conversations) == asked
    assert records[0]["id"] == "a"
    assert records[0]["prompt"] == "one"
    assert records[1]["messages"] == lines[1]["messages"]
    assert len(records[1]["outputs"]) == 2
    assert records[2]["prompt"] == [7, 8, 9]
    llm.prompts, llm.params, llm.conversations = [], [], []
    assert rooftile(*command, "--output", str(target)).exit_code == 0
    assert (list(zip(llm.prompts, llm.params, strict=True)), llm.conversations) == asked


def test_one_json_line_is_streamed_as_it_asks(llm: FakeLLM, rooftile: Run) -> None:
    line = '{"prompt": "a b", "temperature": 0, "max_tokens": 3}'
    result = rooftile("generate", "-m", "x", "-i", "-", input=line)
    assert result.stdout == "re: a b\n"
    assert llm.params == [SamplingParams(temperature=0, max_tokens=3)]


def test_a_brace_that_opens_no_json_is_text(llm: FakeLLM, rooftile: Run) -> None:
    for text in ("{" * 100_000, '{"a": ' * 100_000):
        assert rooftile("generate", "-m", "x", "--raw", "-i", "-", input=text).exit_code == 0
        assert llm.prompts.pop() == text.strip()


def test_no_prompt_is_a_usage_error(llm: FakeLLM, rooftile: Run) -> None:
    result = rooftile("generate", "-m", "x", input="")
    assert result.exit_code == 2
    assert "no prompt" in result.stderr


def test_a_missing_file_is_named(llm: FakeLLM, rooftile: Run) -> None:
    result = rooftile("generate", "-m", "x", "-i", "nowhere.txt")
    assert result.exit_code == 1
    assert result.stderr == "error: nowhere.txt: No such file or directory\n"
    assert "Traceback" not in result.output


def test_every_sampling_parameter_arrives(llm: FakeLLM, rooftile: Run) -> None:
    result = rooftile(
        "generate", "-m", "x", "--json", "p", "-n", "3", "-t", "0.5", "--top-p", "0.9",
        "--top-k", "7", "--min-p", "0.05", "--repetition-penalty", "1.1",
        "--presence-penalty", "0.2", "--frequency-penalty", "0.3", "--logit-bias", "5=-2.5",
        "--logit-bias", "9=1", "--seed", "11", "--max-tokens", "20", "--min-tokens", "2",
        "--stop", "END", "--stop", "\n\n", "--stop-token-id", "4", "--ignore-eos",
        "--logprobs", "2", "--keep-special-tokens", "--prompt-logprobs", "3", "--bad-word", "rude",
        "--bad-word", "a b", "--include-stop",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert llm.params == [
        SamplingParams(
            n=3, temperature=0.5, top_p=0.9, top_k=7, min_p=0.05, repetition_penalty=1.1,
            presence_penalty=0.2, frequency_penalty=0.3, logit_bias={5: -2.5, 9: 1.0}, seed=11,
            max_tokens=20, min_tokens=2, stop=["END", "\n\n"], stop_token_ids=[4],
            ignore_eos=True, logprobs=2, skip_special_tokens=False, prompt_logprobs=3,
            bad_words=["rude", "a b"], include_stop_str_in_output=True,
        )
    ]  # fmt: skip
    assert llm.seed == 11
    plain = SamplingParams()
    for field in dataclasses.fields(SamplingParams):  # every one that a command line can give
        if field.name != "logits_processor":
            assert getattr(llm.params[0], field.name) != getattr(plain, field.name)


def test_what_the_model_recommends_is_the_default(
    llm: FakeLLM, rooftile: Run, tmp_path: Path
) -> None:
    llm.sampling_defaults = {"temperature": 0.3, "top_p": 0.8, "top_k": 9}
    rooftile("generate", "-m", "x", "--json", "p", "--top-p", "1", "--max-tokens", "5")
    assert llm.params.pop() == SamplingParams(temperature=0.3, top_k=9, max_tokens=5)
    rooftile("generate", "-m", "x", "p", "-t", "0.7", "--top-k", "0")  # the fallbacks, but given
    assert llm.params.pop() == SamplingParams(temperature=0.7, top_p=0.8, max_tokens=512)
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"prompt": "a", "temperature": 0.7}\n{"prompt": "b", "top_p": 1.0}\nc\n')
    rooftile("generate", "-m", "x", "--json", "-i", str(lines), "--top-k", "4")
    assert llm.params == [
        SamplingParams(temperature=0.7, top_p=0.8, top_k=4, max_tokens=512),
        SamplingParams(temperature=0.3, top_k=4, max_tokens=512),
        SamplingParams(temperature=0.3, top_p=0.8, top_k=4, max_tokens=512),
    ]
    llm.params.clear()
    searched = rooftile("generate", "-m", "x", "p", "--beam-width", "2")
    assert searched.exit_code == 0, searched.output
    assert isinstance(llm.params.pop(), BeamSearchParams)


def test_prompt_logprobs(llm: FakeLLM, rooftile: Run) -> None:
    arguments = ("--prompt-logprobs", "1", "--max-tokens", "0")
    result = rooftile("generate", "-m", "x", "--json", *arguments, "p")
    assert json.loads(result.stdout)["prompt_logprobs"] == [
        None, {"token_id": 2, "logprob": -0.25, "top": [[2, -0.25], [3, -9999.0]]},
    ]  # fmt: skip
    assert llm.params == [SamplingParams(temperature=0.7, max_tokens=0, prompt_logprobs=1)]


def test_beam_search(llm: FakeLLM, rooftile: Run) -> None:
    result = rooftile(
        "generate", "-m", "x", "--raw", "p", "--beam-width", "5", "--n-best", "2", "--ignore-eos",
        "--length-penalty", "0.5", "--early-stopping", "never", "--max-tokens", "8", "--seed", "3",
        "--keep-special-tokens",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert result.stdout == (
        "--- answer 1 of 2, score -1.500\nre: p\n--- answer 2 of 2, score -2.000\nre: p\n"
    )
    assert llm.params == [
        BeamSearchParams(
            width=5, n_best=2, length_penalty=0.5, early_stopping="never", max_tokens=8,
            ignore_eos=True, skip_special_tokens=False,
        )
    ]  # fmt: skip
    assert (llm.prompts, llm.seed) == (["p"], 3)


def test_beam_search_of_one_answer_and_as_json(llm: FakeLLM, rooftile: Run) -> None:
    search = ("generate", "-m", "x", "--beam-width", "2", "--early-stopping", "yes", "p")
    assert rooftile(*search).stdout == "re: p\n"
    (answer,) = json.loads(rooftile(*search, "--json").stdout)["outputs"]
    assert (answer["score"], answer["cumulative_logprob"]) == (-1.5, -3.0)
    assert llm.params[0].early_stopping is True


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--beam-width", "4", "-t", "0.7", "--top-p", "1"], "--temperature, --top-p: has no mean"),
        (["--beam-width", "4", "-n", "2"], "--n: has no meaning in beam search"),
        (["--beam-width", "4", "--stop", "x", "--logprobs", "1"], "--stop, --logprobs: has no"),
        (["--n-best", "1"], "--n-best: needs --beam-width"),
        (["--length-penalty", "2", "--early-stopping", "no"], "early-stopping: needs --beam-width"),
        (["--beam-width", "4", "--early-stopping", "soon"], "'soon' is not one of"),
    ],
)
def test_options_that_would_be_ignored_are_named(
    llm: FakeLLM, rooftile: Run, options: list[str], said: str
) -> None:
    result = rooftile("generate", "-m", "x", *options, "p")
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.replace("│", " ").split())
    assert llm.options is None


def test_a_beam_width_out_of_range(llm: FakeLLM, rooftile: Run) -> None:
    result = rooftile("generate", "-m", "x", "--beam-width", "2", "--n-best", "3", "p")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: n_best is 3; it must be a whole number from 1 to 2")


def test_every_engine_option_arrives(llm: FakeLLM, rooftile: Run) -> None:
    rooftile(
        "generate", "-m", "some/model", "p", "--dtype", "float32", "--device", "cpu",
        "--page-size", "8", "--max-num-seqs", "3", "--max-num-batched-tokens", "64",
        "--max-model-len", "99", "--num-pages", "12", "--kv-memory-share", "0.1",
        "--no-prefix-cache", "--random-weights",
    )  # fmt: skip
    options = llm.options
    assert options is not None
    assert (options.model, options.dtype, options.device) == ("some/model", "float32", "cpu")
    assert (options.page_size, options.max_num_seqs, options.max_num_batched_tokens) == (8, 3, 64)
    assert (options.max_model_len, options.num_pages, options.kv_memory_share) == (99, 12, 0.1)
    assert (options.no_prefix_cache, options.random_weights) == (True, True)


def test_a_bad_parameter_is_one_line_before_any_loading(llm: FakeLLM, rooftile: Run) -> None:
    result = rooftile("generate", "-m", "x", "--top-p", "1.5", "p")
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("error: top_p is 1.5")
    assert llm.options is None


def test_debug_shows_the_traceback(llm: FakeLLM, rooftile: Run) -> None:
    for extra, environment in ((["--debug"], {}), ([], {"ROOFTILE_DEBUG": "1"})):
        result = rooftile(*extra, "generate", "-m", "x", "--top-p", "2", "p", **environment)
        assert isinstance(result.exception, ValueError)


@pytest.mark.parametrize("bias", ["5", "x=1", "5=y"])
def test_a_bad_logit_bias_is_a_usage_error(llm: FakeLLM, rooftile: Run, bias: str) -> None:
    result = rooftile("generate", "-m", "x", "--logit-bias", bias, "p")
    assert result.exit_code == 2
    assert "is not ID=BIAS" in result.stderr


def test_a_failed_prompt_leaves_the_others_and_the_exit_code(llm: FakeLLM, rooftile: Run) -> None:
    result = rooftile("generate", "-m", "x", "--raw", "fail", "fine")
    assert result.exit_code == 1
    assert "re: fine" in result.stdout
    assert "error: it broke" in result.stderr


def test_raw_or_chat(llm: FakeLLM, rooftile: Run) -> None:
    rooftile("generate", "-m", "x", "--raw", "a")
    assert llm.prompts == ["a"]
    rooftile("generate", "-m", "x", "--system", "be brief", "b")
    assert llm.conversations[-1][0] == {"role": "system", "content": "be brief"}
    llm.tokenizer.has_chat_template = False
    rooftile("generate", "-m", "x", "c")
    assert llm.prompts[-1] == "c"
    refused = rooftile("generate", "-m", "x", "--system", "s", "d")
    assert refused.exit_code == 1
    assert "needs a chat template" in refused.stderr
    assert rooftile("generate", "-m", "x", "--raw", "--system", "s", "d").exit_code == 2


def test_a_closed_pipe_ends_quietly() -> None:
    script = (
        "from tests.cli.fakes import FakeLLM\n"
        "from rooftile.cli import loading, main\n"
        "loading.load_llm = lambda *_: FakeLLM()\n"
        "main.app(['generate', '-m', 'x', '--raw', *['word ' * 2000] * 50])\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(timeout=30) == 1


@pytest.mark.parametrize("option", ["--logprobs", "--prompt-logprobs"])
def test_what_plain_text_does_not_show_is_refused(llm: FakeLLM, rooftile: Run, option: str) -> None:
    result = rooftile("generate", "-m", "x", option, "2", "p")
    assert result.exit_code == 2
    assert option in result.stderr
    assert "--json" in result.stderr
