"""The peer: what it says when it is not there, and how it counts."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rooftile.bench import contenders
from rooftile.bench.contenders import Transformers, peer_types
from rooftile.bench.start_up import start_up
from rooftile.bench.workloads import Request


def test_peers_by_name() -> None:
    assert peer_types("") == []
    assert peer_types(" transformers ,") == [Transformers]
    assert [peer.name for peer in peer_types("openvino,llama-cpp")] == ["openvino", "llama-cpp"]
    with pytest.raises(
        ValueError, match="no peer 'vllm'; choose from llama-cpp, transformers, openvino"
    ):
        peer_types("transformers,vllm")


def test_an_absent_peer_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)  # an import then raises ImportError
    with pytest.raises(ValueError, match="not installed: pip install 'rooftile"):
        Transformers("demo")


def test_what_is_missing_is_said_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there = {"transformers"}
    monkeypatch.setattr(contenders, "find_spec", lambda name: name if name in there else None)
    with pytest.raises(ModuleNotFoundError, match=r"needs accelerate: pip install .*\[peers\]"):
        contenders.check_installed([Transformers])
    with pytest.raises(ModuleNotFoundError, match=r"openvino and openvino_genai.*\[cpu-peers\]"):
        contenders.check_installed(peer_types("openvino"))
    there.add("accelerate")
    contenders.check_installed([Transformers])


def test_a_process_that_refuses_says_why_in_one_line() -> None:
    with pytest.raises(ValueError, match=r"^rooftile: model 'no-such-model': no such file"):
        start_up("rooftile", "no-such-model", {}, 1)


@pytest.fixture
def peer(tmp_path: Path) -> Transformers:
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16,
        "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "vocab_size": 64, "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
        "eos_token_id": 1,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    return Transformers(str(tmp_path), random_weights=True)


def spy(peer: Transformers, seen: list[dict[str, Any]]) -> Callable[..., Any]:
    generate = peer._model.generate

    def call(**arguments: Any) -> Any:
        out = generate(**arguments)
        seen.append({**arguments, "out": out})
        return out

    return call


def test_batches_are_padded_left_and_run_to_their_length(peer: Transformers) -> None:
    seen: list[dict[str, Any]] = []
    peer._model.generate = spy(peer, seen)
    peer.batch = 2
    requests = [Request((5, 6, 7), 3), Request((8,), 5, n=2), Request((9, 9), 2)]
    assert peer.run(requests, 0.6) == [3, 10, 2]
    first, second = seen
    assert first["input_ids"].tolist() == [[5, 6, 7], [0, 0, 8]]
    assert first["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]
    assert first["out"].shape == (4, 3 + 5)  # two answers each, no early end
    assert (first["do_sample"], first["temperature"]) == (True, 0.6)
    assert second["out"].shape == (1, 2 + 2)


def test_greedy_runs_past_the_end_token(peer: Transformers) -> None:
    import torch

    with torch.no_grad():  # the end token wins everywhere
        peer._model.lm_head.weight.zero_()
    assert peer.run([Request((5, 6), 9)], 0.0) == [9]
