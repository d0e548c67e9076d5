"""The sampling in a model's files: what is read, what is refused, and where it holds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rooftile.engine.llm import LLM
from rooftile.engine.params import SamplingParams
from rooftile.models.sampling_defaults import sampling_of_generation_config, sampling_of_gguf
from tests.engine.conftest import write_model

PATH = Path("generation_config.json")
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "random_weights": True, "num_pages": 64, "page_size": 4, "device": "cpu",
}  # fmt: skip


def test_a_generation_config() -> None:
    values = {
        "temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.0, "repetition_penalty": 1.05,
        "do_sample": True, "eos_token_id": 3, "max_new_tokens": 9,
    }  # fmt: skip
    assert sampling_of_generation_config(values, PATH) == {
        "temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.0, "repetition_penalty": 1.05,
    }  # fmt: skip
    greedy = {"do_sample": False, "temperature": 0.6, "top_p": None, "top_k": -1}
    assert sampling_of_generation_config(greedy, PATH) == {"temperature": 0.0, "top_k": 0}
    assert sampling_of_generation_config({}, PATH) == {}


def test_a_gguf_file() -> None:
    metadata = {
        "general.sampling.temp": 0.699999988079071, "general.sampling.top_p": 0.949999988079071,
        "general.sampling.top_k": 64, "general.sampling.min_p": 0.009999999776482582,
        "general.sampling.penalty_repeat": 1.0, "general.sampling.mirostat": 0, "temperature": 3.0,
    }  # fmt: skip
    assert sampling_of_gguf(metadata, PATH) == {
        "temperature": 0.7, "top_p": 0.95, "top_k": 64, "min_p": 0.01, "repetition_penalty": 1.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1), ("temperature", "hot"), ("temperature", True),
        ("temperature", float("nan")), ("temperature", 10**400), ("temperature", 1e39),
        ("temperature", [0.5]), ("top_p", 0.0), ("top_p", 1e-50), ("top_p", 1.5), ("top_k", 2.5),
        ("top_k", 40.0), ("top_k", -2), ("top_k", 2**63), ("top_k", False), ("min_p", -0.5),
        ("min_p", 1.01), ("repetition_penalty", 0), ("repetition_penalty", float("inf")),
    ],
)  # fmt: skip
def test_what_no_request_may_say_is_refused(name: str, value: Any) -> None:
    """The same values that SamplingParams refuses, so that no request fails for the file's sake."""
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: value})
    expected = rf"^generation_config\.json: {name} is .*; it must be .*generation_config=False"
    with pytest.raises(ValueError, match=expected):
        sampling_of_generation_config({name: value}, PATH)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0), ("temperature", 3e38), ("top_p", 1.2e-38), ("top_p", 1), ("top_k", 0),
        ("top_k", 2**63 - 1), ("min_p", 1.0), ("repetition_penalty", 1.2e-38),
    ],
)  # fmt: skip
def test_the_ends_of_the_ranges_are_in_them(name: str, value: Any) -> None:
    SamplingParams(**sampling_of_generation_config({name: value}, PATH))


def test_a_gguf_field_is_refused_by_its_own_name() -> None:
    with pytest.raises(ValueError, match=r"m\.gguf: general\.sampling\.temp is -1\.0; it must be"):
        sampling_of_gguf({"general.sampling.temp": -1.0}, Path("m.gguf"))
    with pytest.raises(ValueError, match="do_sample is 'no'; it must be true or false"):
        sampling_of_generation_config({"do_sample": "no"}, PATH)


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., LLM]:
    write_model(tmp_path)

    def make(config: dict[str, Any], **options: Any) -> LLM:
        (tmp_path / "generation_config.json").write_text(json.dumps(config))
        return LLM(tmp_path, **OPTIONS, **options)

    return make


def test_they_hold_where_a_request_has_no_params(make: Callable[..., LLM]) -> None:
    greedy = SamplingParams(temperature=0.0)
    llm = make({"do_sample": False})
    assert llm.sampling_defaults == {"temperature": 0.0}
    expected = llm.generate("abc", greedy)[0].outputs[0].token_ids
    assert llm.generate("abc")[0].outputs[0].token_ids == expected
    assert [*llm.stream("abc")][-1].outputs[0].token_ids == expected
    assert llm.chat([{"role": "user", "content": "x"}])[0].outputs[0].token_ids == (
        llm.chat([{"role": "user", "content": "x"}], greedy)[0].outputs[0].token_ids
    )
    given = llm.generate("abc", SamplingParams(seed=3))[0].outputs[0].token_ids
    assert given != expected  # params that are given count as they are: temperature 1
    assert (
        given
        == llm.generate("abc", SamplingParams(seed=3, temperature=1.0))[0].outputs[0].token_ids
    )


def test_they_can_be_left_out(make: Callable[..., LLM]) -> None:
    bad = {"temperature": -1, "eos_token_id": 5}
    with pytest.raises(ValueError, match=r"generation_config\.json: temperature is -1"):
        make(bad)
    assert make(bad, generation_config=False).sampling_defaults == {}
    with pytest.raises(ValueError, match="generation_config is 'none'; it must be True or False"):
        make(bad, generation_config="none")
