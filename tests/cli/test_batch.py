"""Long runs: every line answered once, whatever is wrong with some and wherever a run is cut."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rooftile.cli import loading
from rooftile.cli.batch import progress as progress_module
from rooftile.cli.batch.lines import InputFile
from rooftile.cli.batch.results import OutputFile
from rooftile.engine.params import BeamSearchParams, SamplingParams
from tests.cli.fakes import FakeLLM
from tests.engine.conftest import write_model
from tests.support.gate import wait_until

Run = Callable[..., Any]


@pytest.fixture
def batch(llm: FakeLLM, rooftile: Run, tmp_path: Path) -> Run:
    """`batch(*lines)` writes them to a file and runs it; the result has the records, too."""

    def run(*lines: Any, options: tuple[str, ...] = ("--raw",), model: str = "x") -> Any:
        if lines:
            texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
            (tmp_path / "in.jsonl").write_text("".join(f"{text}\n" for text in texts))
        files = ("-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl"))
        result = rooftile("generate", "-m", model, *files, *options)
        result.records = records(tmp_path / "out.jsonl")
        return result

    return run


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def texts(result: Any) -> dict[Any, str]:
    return {r["id"]: r["outputs"][0]["text"] for r in result.records if r["error"] is None}


def chat(custom_id: str, content: str = "hi", **more: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": content}], **more}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def complete(custom_id: str, prompt: Any, **more: Any) -> dict[str, Any]:
    body = {"prompt": prompt, **more}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}


def test_lines_are_answered_as_they_finish(llm: FakeLLM, batch: Run) -> None:
    result = batch(
        {"prompt": "a", "id": "one"}, "", {"prompt": "b", "id": 2, "n": 3}, {"prompt": "c"}
    )
    assert result.exit_code == 0
    assert result.stdout == ""
    assert "3 of 3 lines done, 0 failed; 6 new tokens" in result.stderr
    assert texts(result) == {"one": "re: a", 2: "re: b", None: "re: c"}
    assert [r["id"] for r in result.records] == [2, "one", None]  # as the fake finishes them
    assert [(r["index"], r["line"]) for r in result.records] == [(1, 3), (0, 1), (2, 4)]
    first = result.records[0]
    assert len(first["outputs"]) == 3
    assert (first["prompt_tokens"], first["cached_tokens"]) == (3, 1)


def test_a_line_overrides_the_options(llm: FakeLLM, batch: Run) -> None:
    batch(
        {"prompt": "a"},
        {"prompt": "b", "temperature": 0, "max_tokens": 3, "logit_bias": {"4": 1}},
        chat("c", max_tokens=9),
        options=("-t", "0.2", "--max-tokens", "7", "--stop", "X"),
    )
    assert llm.params == [
        SamplingParams(temperature=0.2, max_tokens=7, stop="X"),
        SamplingParams(temperature=0, max_tokens=3, stop="X", logit_bias={4: 1}),
        SamplingParams(temperature=0.2, max_tokens=9, stop="X"),
    ]


def test_what_the_model_recommends_is_the_default(llm: FakeLLM, batch: Run) -> None:
    llm.sampling_defaults = {"temperature": 0.3, "top_p": 0.8}
    lines = ({"prompt": "a"}, {"prompt": "b", "temperature": 0.7}, complete("c", "d", top_p=1))
    batch(*lines, options=("--max-tokens", "7"))
    assert llm.params == [
        SamplingParams(temperature=0.3, top_p=0.8, max_tokens=7),
        SamplingParams(temperature=0.7, top_p=0.8, max_tokens=7),
        SamplingParams(temperature=0.3, top_p=1, max_tokens=7),
    ]
    for options in (("-t", "0.7"), ("--no-generation-config",)):  # other answers
        refused = batch(*lines, options=("--max-tokens", "7", *options))
        assert "results of another input, model or options" in refused.stderr


def test_chat_raw_and_system(llm: FakeLLM, batch: Run, tmp_path: Path) -> None:
    own = [{"role": "system", "content": "rude"}, {"role": "user", "content": "m"}]
    lines = ({"prompt": "p"}, {"messages": own}, {"messages": own[1:]}, {"prompt": [5, 6]})
    result = batch(*lines[:3], options=("--system", "kind"))
    assert result.exit_code == 0
    kind = {"role": "system", "content": "kind"}
    assert llm.conversations == [
        [kind, {"role": "user", "content": "p"}], own, [kind, own[1]],
    ]  # fmt: skip
    llm.tokenizer.has_chat_template = False
    refused = batch(options=("--system", "kind", "--overwrite"))
    assert refused.exit_code == 1
    assert "--system needs a chat template" in refused.stderr
    assert len(records(tmp_path / "out.jsonl")) == 3  # nothing was lost by that


def test_openai_batches(llm: FakeLLM, batch: Run) -> None:
    result = batch(
        chat("a", "hello", model="some/model"),
        complete("b", ["x", "y"], n=2),
        chat("c", model="other"),
        complete("d", "fail"),
        complete("e", ["z", "refuse"]),
        chat("f", stream=True),
        model="some/model",
    )
    assert result.exit_code == 1
    by_id = {record["custom_id"]: record for record in result.records}
    assert len(by_id) == len(result.records) == 6
    for record in result.records:
        assert record.keys() == {"id", "custom_id", "response", "error"}
        assert record["id"].startswith("batch_req_")
    a, b = by_id["a"]["response"], by_id["b"]["response"]
    assert (a["status_code"], b["status_code"]) == (200, 200)
    assert a["body"]["object"] == "chat.completion"
    assert a["body"]["model"] == "some/model"
    assert a["body"]["choices"] == [
        {
            "index": 0, "message": {"role": "assistant", "content": "re: hello", "refusal": None},
            "logprobs": None, "finish_reason": "stop", "stop_reason": None,
        }
    ]  # fmt: skip
    assert b["body"]["object"] == "text_completion"
    assert [c["index"] for c in b["body"]["choices"]] == [0, 1, 2, 3]
    assert [c["text"] for c in b["body"]["choices"]] == ["re: x", "re: x", "re: y", "re: y"]
    assert b["body"]["usage"] == {
        "prompt_tokens": 6, "completion_tokens": 8, "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 2},
    }  # fmt: skip
    for name, status, said in (
        ("c", 404, 'line 3: there is no model "other" here but some/model'),
        ("d", 500, "it broke"),
        ("e", 400, "line 5: the prompt has 9 tokens"),
        ("f", 400, "line 6: stream is not supported"),
    ):
        record = by_id[name]
        assert record["response"]["status_code"] == status
        assert record["response"]["body"]["error"]["message"] == record["error"]["message"]
        assert record["error"]["message"].startswith(said)


def test_served_model_names(llm: FakeLLM, batch: Run) -> None:
    names = ("--raw", "--served-model-name", "gpt", "--served-model-name", "other")
    result = batch(chat("a", model="other"), chat("b"), chat("c", model="x"), options=names)
    answers = {r["custom_id"]: r["response"] for r in result.records}
    assert (answers["a"]["body"]["model"], answers["b"]["body"]["model"]) == ("other", "gpt")
    assert answers["c"]["status_code"] == 404


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{broken", "not valid JSON"),
        ("plain text", "not valid JSON"),
        ("[1]", "must be a JSON object"),
        ("[" * 100_000, "nested too deeply"),
        ('{"prompt": 3}', "prompt is 3"),
        ('{"id": "bad"}', "give either"),
        ('{"id": [1], "prompt": "x"}', "id must be"),
        ('{"prompt": "x", "temperature": NaN}', "temperature is nan"),
        ('{"prompt": "x", "promt": 1}', "there is no field"),
        ('{"prompt": "refuse"}', "the prompt has 9 tokens"),
    ],
)
def test_a_bad_line_is_reported_and_skipped(batch: Run, line: str, said: str) -> None:
    result = batch({"prompt": "a"}, line, {"prompt": "b"})
    assert result.exit_code == 1
    assert "3 of 3 lines done, 1 failed" in result.stderr
    (bad,) = [record for record in result.records if record["error"] is not None]
    assert bad["error"].startswith("line 2: ")
    assert f"error: {bad['error']}" in result.stderr.replace("\n", "")
    assert said in bad["error"]
    assert (bad["line"], bad["index"], bad["outputs"]) == (2, 1, [])
    assert len(result.records) == 3
    again = batch()
    assert again.exit_code == 1  # it is still a failure of this file
    assert again.records == result.records


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"custom_id": "q"}, "url must be one of /v1/chat/completions, /v1/completions"),
        ({**chat("q"), "url": "/v1/embeddings"}, "url must be one of"),
        ({**chat("q"), "method": "GET"}, "method must be POST"),
        ({**chat("q"), "more": 1}, 'there is no field "more" beside custom_id'),
        ({**chat("q"), "body": None}, "the body is missing"),
        ({**chat("q"), "custom_id": 3}, "custom_id is missing, or no string"),
        ("{", "not valid JSON"),
    ],
)
def test_bad_lines_of_an_openai_batch_keep_its_format(batch: Run, line: Any, said: str) -> None:
    result = batch(line, chat("fine"))
    bad, fine = sorted(result.records, key=lambda record: record["error"] is None)
    assert fine["custom_id"] == "fine"
    assert bad["response"]["status_code"] == 400
    assert f"line 1: {said}" in bad["error"]["message"]


def test_text_that_is_no_unicode(llm: FakeLLM, batch: Run, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(
        b'\xef\xbb\xbf{"prompt": "bom"}\r\n{"prompt": "\xff"}\n{"prompt": "x", "id": "\\ud800"}'
    )
    result = batch()
    assert [record["line"] for record in result.records if record["error"]] == [2]
    assert texts(result) == {None: "re: bom", "\ud800": "re: x"}


def test_failures_of_the_engine(batch: Run) -> None:
    result = batch({"prompt": "fail", "id": 1}, {"prompt": "a", "id": 2})
    assert result.exit_code == 1
    assert {r["id"]: r["error"] for r in result.records} == {1: "it broke", 2: None}


def test_equal_ids_are_refused_before_loading(llm: FakeLLM, batch: Run) -> None:
    lines = [{"prompt": "a", "id": "x"}, {"prompt": "b"}, "", {"prompt": "c", "id": "x"}]
    result = batch(*lines)
    assert result.exit_code == 1
    assert 'lines 1 and 4 have the same id "x"' in result.stderr
    assert llm.options is None
    assert result.records == []
    assert batch({"prompt": "a", "id": "1"}, {"prompt": "b", "id": 1}).exit_code == 0


def test_equal_hashes_are_not_equal_ids(batch: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rooftile.cli.batch.lines._hash", lambda _: 7)
    assert batch({"prompt": "a", "id": 1}, {"prompt": "b", "id": 2}).exit_code == 0


def test_a_second_run_does_only_what_is_missing(llm: FakeLLM, batch: Run, tmp_path: Path) -> None:
    first = batch({"prompt": "a"}, {"prompt": "b"})
    llm.prompts.clear()
    more = batch({"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"})  # the input has grown
    assert llm.prompts == ["c"]
    assert more.records[:2] == first.records
    assert "2 lines were done before" in more.stderr
    llm.options = None
    assert batch().exit_code == 0
    assert llm.options is None  # nothing to do: no model is loaded
    (tmp_path / "out.jsonl").write_text(json.dumps(more.records[1]) + "\n")
    llm.prompts.clear()
    batch()
    assert llm.prompts == ["b", "c"]  # of lines that were taken out of the results


@pytest.mark.parametrize(
    "change", [{"lines": ("c", "b")}, {"options": ("--raw", "-t", "0")}, {"model": "y"}]
)
def test_results_of_something_else_are_refused(
    llm: FakeLLM, batch: Run, change: dict[str, Any]
) -> None:
    before = batch({"prompt": "a"}, {"prompt": "b"}).records
    lines = [{"prompt": p} for p in change.pop("lines", ("a", "b"))]
    result = batch(*lines, **change)
    assert result.exit_code == 1
    assert "results of another input, model or options" in result.stderr
    assert result.records == before
    change["options"] = (*change.get("options", ("--raw",)), "--overwrite")
    llm.prompts.clear()
    assert batch(*lines, **change).exit_code == 0
    assert len(llm.prompts) == 2


def test_a_shorter_input_is_another_input(batch: Run) -> None:
    batch({"prompt": "a"}, {"prompt": "b"})
    assert "results of another input" in batch({"prompt": "a"}).stderr


@pytest.mark.parametrize(
    "content",
    ["notes\n", "{}\n", '{"id": "batch_req_x", "custom_id": "a", "error": null}\n', "[]\n", "\0\n",
     '{"id": 1, "line": 0, "digest": "aa", "error": null}\n'],
)  # fmt: skip
def test_other_files_are_not_touched(batch: Run, tmp_path: Path, content: str) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n')
    out = tmp_path / "out.jsonl"
    out.write_text(content)
    files = ("-i", str(tmp_path / "in.jsonl"), "-o", str(out))
    from typer.testing import CliRunner

    from rooftile.cli.main import app

    result = CliRunner().invoke(app, ["generate", "-m", "x", *files])
    assert result.exit_code == 1
    assert "line 1 is no result of" in result.stderr
    assert out.read_text() == content


def test_what_output_goes_with(llm: FakeLLM, rooftile: Run, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "a"}\n')
    files = ["-i", str(source), "-o", str(tmp_path / "out.jsonl")]
    for arguments in (files[2:], [*files, "a prompt"], [*files, "--json"], ["-i", "-", *files[2:]]):
        result = rooftile("generate", "-m", "x", *arguments)
        assert result.exit_code == 2
        assert "--input FILE" in result.stderr
    for option in (["--overwrite"], ["--served-model-name", "n"]):
        assert rooftile("generate", "-m", "x", "p", *option).exit_code == 2
    result = rooftile("generate", "-m", "x", "-i", str(source), "-o", str(source), "--overwrite")
    assert "is the input itself" in result.stderr
    assert source.read_text() == '{"prompt": "a"}\n'
    result = rooftile("generate", "-m", "x", "-i", str(source), "-o", "/dev/null")
    assert "no regular file" in result.stderr
    result = rooftile("generate", "-m", "x", "-i", str(tmp_path / "no.jsonl"), *files[2:])
    assert (result.exit_code, "no.jsonl" in result.stderr) == (1, True)


def test_beam_search_over_a_file(llm: FakeLLM, batch: Run) -> None:
    options = ("--raw", "--beam-width", "4", "--n-best", "2", "--max-tokens", "6")
    result = batch(
        {"prompt": "a", "id": 1, "width": 5}, {"prompt": "b", "temperature": 1}, complete("c", "d"),
        options=options,
    )  # fmt: skip
    assert llm.params == [
        BeamSearchParams(width=5, n_best=2, max_tokens=6),
        BeamSearchParams(width=4, n_best=2, max_tokens=6),
    ]
    by_line = {r.get("line", 3): r for r in result.records}
    assert [answer["score"] for answer in by_line[1]["outputs"]] == [-1.5, -2.0]
    assert by_line[2]["error"] == "line 2: temperature has no meaning in beam search; leave it out"
    assert by_line[3]["response"]["body"]["choices"][1]["score"] == -2.0


def test_a_full_disk_is_one_line(
    batch: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rooftile.cli.batch.results.write_all", fill_disk)
    result = batch({"prompt": "a"}, {"prompt": "b"})
    assert result.exit_code == 1
    assert "No space left on device; once that is put right, the same command" in result.stderr
    assert result.records == []


def fill_disk(file: Any, line: bytes) -> None:
    raise OSError(28, "No space left on device")


def test_two_runs_cannot_write_to_one_file(batch: Run, tmp_path: Path) -> None:
    with OutputFile(tmp_path / "out.jsonl", overwrite=False):
        result = batch({"prompt": "a"})
    assert result.exit_code == 1
    assert "another run is writing to" in result.stderr
    assert batch().exit_code == 0


def test_progress_in_a_pipe(batch: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_module, "SECONDS_BETWEEN_LINES", 0.0)
    monkeypatch.setattr(progress_module, "SECONDS_BETWEEN_UPDATES", 0.0)
    result = batch(*({"prompt": str(n)} for n in range(4)))
    assert "2 of 4 lines done, 0 failed; " in result.stderr
    assert "; about 0 min left" in result.stderr


def test_memory_does_not_grow_with_the_input(tmp_path: Path) -> None:
    """A scan keeps a digest and an id's hash of each line, not the line."""
    import tracemalloc

    path = tmp_path / "long.jsonl"
    with path.open("w") as file:
        for n in range(20_000):
            file.write(f'{{"id": {n}, "prompt": "{"word " * 40}"}}\n')
    tracemalloc.start()
    scan = InputFile(path, "").scan()
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert scan.num_requests == 20_000
    assert most < 64 * 20_000


# ------------------------------------------------------------------ a real engine


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from rooftile.engine.llm import LLM

    path = write_model(tmp_path_factory.mktemp("tiny"))
    return LLM(str(path), dtype="float32", random_weights=True, num_pages=64, page_size=4)


def test_with_an_engine(tiny: Any, rooftile: Run, batch: Run, monkeypatch: Any) -> None:
    monkeypatch.setattr(loading, "load_llm", lambda *_: tiny)
    greedy = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}
    result = batch(
        {"prompt": "abc", **greedy, "logprobs": 1, "prompt_logprobs": 0, "id": "own"},
        {"prompt": "x" * 500, "id": "long"},
        complete("text", ["abc", "naïve"], **greedy, logprobs=2),
        chat("chat", "abc", **greedy, logprobs=True, top_logprobs=1),
        chat("template", chat_template_kwargs={"m": 1}),
        complete("scored", "abc", max_tokens=0, prompt_logprobs=1),
        options=("--raw", "--max-tokens", "4"),
    )
    own = {record["id"]: record for record in result.records}
    answers = {r["custom_id"]: r["response"] for r in result.records if "custom_id" in r}
    assert result.exit_code == 1
    assert "1 failed" in result.stderr
    assert own["long"]["error"].startswith("line 2: the prompt has 500 tokens")
    (answer,) = own["own"]["outputs"]
    assert [entry["token_id"] for entry in answer["logprobs"]] == answer["token_ids"]
    assert own["own"]["prompt_logprobs"][0] is None
    assert [e["token_id"] for e in own["own"]["prompt_logprobs"][1:]] == tiny.tokenizer.encode(
        "abc"
    )[1:]
    first, second = answers["text"]["body"]["choices"]
    assert first["text"] == answer["text"]
    given = first["logprobs"]
    assert given["token_logprobs"] == pytest.approx([e["logprob"] for e in answer["logprobs"]])
    assert [max(top.values()) for top in given["top_logprobs"]] == given["token_logprobs"]
    assert given["text_offset"][0] == 0
    assert len(second["logprobs"]["tokens"]) == 4
    content = answers["chat"]["body"]["choices"][0]["logprobs"]["content"]
    assert len(content) == 4
    assert content[0]["top_logprobs"] == [
        {k: v for k, v in content[0].items() if k != "top_logprobs"}
    ]
    (scored,) = answers["scored"]["body"]["choices"]
    assert len(scored["prompt_logprobs"]) == 3
    assert tiny.stats().kv.in_use == 0


# ------------------------------------------------------------------ cut anywhere

LINES = [
    {"prompt": "a", "id": "one"}, "", {"prompt": "refuse"}, "{broken", chat("r1", "ä\u2028b"),
    {"prompt": "fail"}, complete("r2", ["x", "y"]), {"prompt": "c"}, {"prompt": "c"},
]  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, bytes]]:
    from typer.testing import CliRunner

    from rooftile.cli.main import app

    directory = tmp_path_factory.mktemp("cut")
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in LINES)
    (directory / "in.jsonl").write_text(text)  # without a line end after the last one
    patch = pytest.MonkeyPatch()
    patch.setattr(loading, "load_llm", lambda *_: FakeLLM())

    def run() -> None:
        files = ["-i", str(directory / "in.jsonl"), "-o", str(directory / "out.jsonl")]
        assert CliRunner().invoke(app, ["generate", "-m", "x", *files]).exit_code == 1

    run()
    yield directory, (directory / "out.jsonl").read_bytes(), run  # type: ignore[misc]
    patch.undo()


def without_times(record: dict[str, Any]) -> str:
    if record.get("response"):
        record["response"]["body"].pop("created", None)
    return json.dumps(record, sort_keys=True)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 1), again=st.floats(0, 1))
def test_a_run_cut_at_any_byte_is_completed(whole: Any, share: float, again: float) -> None:
    directory, results, run = whole
    out = directory / "out.jsonl"
    for part in (share, again):
        out.write_bytes(results[: round(part * len(results))])
        kept = out.read_bytes()
        kept = kept[: kept.rfind(b"\n") + 1]
        run()
        assert out.read_bytes().startswith(kept)  # what was finished is not done again
        assert out.read_bytes().endswith(b"\n")
        assert sorted(map(without_times, records(out))) == sorted(
            without_times(json.loads(line)) for line in results.splitlines()
        )
        results = out.read_bytes()  # in an order of its own now


# ------------------------------------------------------------------ killed

SLOW = """
import sys, time
from tests.cli.fakes import FakeLLM
from rooftile.cli import loading, main

class Slow(FakeLLM):
    def run(self, requests, **options):
        for count, result in enumerate(super().run(requests, **options)):
            time.sleep(0.01)
            while count >= int(sys.argv[3]):  # nothing more ends before it is stopped
                time.sleep(0.01)
                options["on_step"]()
            yield result

loading.load_llm = lambda *_: Slow()
main.app(["generate", "-m", "x", "--raw", "-i", sys.argv[1], "-o", sys.argv[2]])
"""


def slow_run(source: Path, out: Path, most: int = 1000) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SLOW, str(source), str(out), str(most)],
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_lines(out: Path, count: int) -> None:
    wait_until(lambda: out.exists() and out.read_bytes().count(b"\n") >= count)


def test_killed_and_interrupted_runs_go_on(tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(f'{{"id": {n}, "prompt": "p{n}"}}\n' for n in range(200)))
    ends = []
    for number, count in ((signal.SIGKILL, 20), (signal.SIGINT, 60)):
        process = slow_run(source, out, most=50)
        wait_for_lines(out, count)
        os.kill(process.pid, number)
        _, said = process.communicate(timeout=120)
        ends.append(process.returncode)
        if number == signal.SIGINT:
            assert "stopped; the same command goes on from here" in said
            assert "Traceback" not in said
        assert count <= out.read_bytes().count(b"\n") < 200
    assert ends == [-signal.SIGKILL, 130]
    process = slow_run(source, out)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 0
    assert "200 of 200 lines done, 0 failed" in said
    assert sorted(record["id"] for record in records(out)) == list(range(200))
