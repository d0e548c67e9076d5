"""Workloads: fixed by name and seed, scaled as asked, and of the shapes that their names promise."""

from __future__ import annotations

import random

import pytest

from rooftile.bench.presets import preset_names, resolve_model
from rooftile.bench.workloads import CPU, WORKLOADS, Request, select

VOCAB = 49152


def test_nano_is_the_published_benchmark() -> None:
    """256 requests of 100 to 1024 in and out, drawn in the order of the original script."""
    r = random.Random(3)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(r.randrange(10, VOCAB - 2000) for _ in range(count))

    expected = [Request(tokens(r.randint(100, 1024)), r.randint(100, 1024), 1) for _ in range(256)]
    assert WORKLOADS["nano"].requests(VOCAB, seed=3) == expected


def test_shapes() -> None:
    prefix = WORKLOADS["prefix"].requests(VOCAB)
    assert len(prefix) == 256
    assert len({r.prompt_token_ids[:2048] for r in prefix}) == 1
    assert len({r.prompt_token_ids for r in prefix}) == 256
    parallel = WORKLOADS["parallel"].requests(VOCAB)
    assert [(len(r.prompt_token_ids), r.max_tokens, r.n) for r in parallel] == [(512, 256, 8)] * 32
    for name, count in (("decode1", 1), ("decode8", 8), ("decode32", 32)):
        requests = WORKLOADS[name].requests(VOCAB)
        assert [(len(r.prompt_token_ids), r.max_tokens) for r in requests] == [(16, 128)] * count


@pytest.mark.parametrize("name", WORKLOADS)
def test_same_seed_same_requests_and_valid_tokens(name: str) -> None:
    workload = WORKLOADS[name]
    first = workload.requests(300, seed=5, num_requests=3, scale=0.1)
    assert first == workload.requests(300, seed=5, num_requests=3, scale=0.1)
    assert first != workload.requests(300, seed=6, num_requests=3, scale=0.1)
    assert len(first) == 3
    for request in first:
        assert request.max_tokens >= 1
        assert request.prompt_token_ids
        assert all(0 <= token < 300 for token in request.prompt_token_ids)


def test_scale_multiplies_lengths() -> None:
    (request,) = WORKLOADS["single"].requests(VOCAB, scale=0.25)
    assert (len(request.prompt_token_ids), request.max_tokens) == (128, 64)


def test_select() -> None:
    assert [w.name for w in select(["cpu", "nano"])] == [*CPU, "nano"]
    with pytest.raises(ValueError, match="no workload 'nanno'; choose from cpu, gpu, prefill512"):
        select(["nanno"])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"scale": 0.0}, "scale is 0.0"),
        ({"scale": 1.5}, "scale is 1.5"),
        ({"num_requests": 0}, "num_requests is 0"),
    ],
)
def test_bad_sizes_are_refused(settings: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        WORKLOADS["single"].requests(VOCAB, **settings)  # type: ignore[arg-type]


def test_presets_are_package_data_with_a_config() -> None:
    assert preset_names() == ["llama-3.1-8b", "qwen3-0.6b"]
    assert resolve_model("bench:qwen3-0.6b", random_weights=True).endswith("qwen3-0.6b")
    assert resolve_model("some/model", random_weights=False) == "some/model"
