"""Safetensors directories: shards, dtypes, everything that can be wrong with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file

from rooftile.models.loader import load_model
from tests.models import hugging_face
from tests.models.paged import PagedRunner

TOKENS = [1, 9, 33, 4, 60, 2]


@pytest.fixture(scope="module")
def model() -> Any:
    return hugging_face.random_model("llama", num_hidden_layers=2)


@pytest.fixture
def directory(model: Any, tmp_path: Path) -> Path:
    hugging_face.save(model, tmp_path)
    return tmp_path


def edit_tensors(directory: Path, **changes: torch.Tensor | None) -> None:
    """Replace, add, or (None) remove tensors; "__" stands for "."."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for name, value in changes.items():
        tensors.pop(name.replace("__", "."), None)
        if value is not None:
            tensors[name.replace("__", ".")] = value
    save_file(tensors, path)


def logits(directory: Path, **options: Any) -> torch.Tensor:
    options.setdefault("dtype", torch.float32)
    loaded = load_model(str(directory), **options)
    return PagedRunner(loaded.decoder).run((0, TOKENS))[0]


def test_shards_with_an_index(model: Any, tmp_path: Path) -> None:
    hugging_face.save(model, tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    torch.testing.assert_close(
        logits(tmp_path), hugging_face.logits(model, TOKENS), rtol=1e-4, atol=1e-4
    )
    next(tmp_path.glob("model-00002*")).unlink()
    with pytest.raises(ValueError, match=r"files that are not there: model-00002-of-"):
        load_model(str(tmp_path))
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ValueError, match="not a valid index"):
        load_model(str(tmp_path))


@pytest.mark.parametrize("stored", [torch.float64, torch.float16, torch.bfloat16])
def test_stored_dtypes_become_the_one_asked_for(
    model: Any, directory: Path, stored: torch.dtype
) -> None:
    tensors = load_file(directory / "model.safetensors")
    save_file(
        {name: value.to(stored) for name, value in tensors.items()},
        directory / "model.safetensors",
    )
    rounded = hugging_face.random_model("llama", num_hidden_layers=2)
    with torch.no_grad():
        for parameter in rounded.parameters():
            parameter.copy_(parameter.to(stored))
    torch.testing.assert_close(
        logits(directory), hugging_face.logits(rounded, TOKENS), rtol=1e-4, atol=1e-4
    )


def test_bfloat16_is_close_and_its_logits_are_float32(model: Any, directory: Path) -> None:
    actual, expected = (
        logits(directory, dtype=torch.bfloat16),
        hugging_face.logits(model, TOKENS),
    )
    assert actual.dtype == torch.float32
    assert (actual - expected).norm() / expected.norm() < 0.03


def test_one_error_lists_all_that_does_not_fit(directory: Path) -> None:
    edit_tensors(
        directory,
        model__layers__0__self_attn__q_proj__weight=None,
        model__norm__weight=None,
        model__layers__1__mlp__up_proj__weight=torch.zeros(47, 32),
        model__layers__1__self_attn__q_proj__bias=torch.zeros(32),
        model__layers__2__mlp__up_proj__weight=torch.zeros(48, 32),
    )
    with pytest.raises(ValueError, match="do not fit the model") as caught:
        load_model(str(directory))
    message = str(caught.value)
    assert str(directory) in message
    assert "2 missing: model.layers.0.self_attn.q_proj.weight, model.norm.weight" in message
    assert (
        "2 unexpected: model.layers.1.self_attn.q_proj.bias, model.layers.2.mlp.up_proj.weight"
        in message
    )
    assert (
        "1 misshapen: model.layers.1.mlp.up_proj.weight is [47, 32], expected [48, 32]" in message
    )


def test_harmless_tensors_are_no_error(model: Any, directory: Path) -> None:
    before = logits(directory)
    edit_tensors(directory, model__layers__0__self_attn__rotary_emb__inv_freq=torch.zeros(4))
    assert torch.equal(logits(directory), before)
    edit_tensors(directory, lm_head__weight=None)
    with pytest.raises(ValueError, match=r"1 missing: lm_head\.weight"):
        load_model(str(directory))
    hugging_face.edit_config(directory, tie_word_embeddings=True)
    tied = logits(directory)
    edit_tensors(directory, lm_head__weight=torch.randn(67, 32))
    assert torch.equal(logits(directory), tied)


def test_quantised_tensors_are_refused(directory: Path) -> None:
    edit_tensors(
        directory, model__layers__0__mlp__up_proj__weight=torch.zeros(48, 32, dtype=torch.int8)
    )
    with pytest.raises(ValueError, match=r"up_proj\.weight \(I8\).*quantised"):
        load_model(str(directory))


@pytest.mark.parametrize("keep", [0, 5, 300, -100])
def test_truncated_files(directory: Path, keep: int) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"model\.safetensors: not a readable.*download it again"):
        load_model(str(directory))


def test_other_formats_and_duplicates(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.rename(directory / "weights.safetensors")
    assert logits(directory).shape == (6, 67)
    (directory / "weights.safetensors").rename(directory / "consolidated.safetensors")
    with pytest.raises(ValueError, match=r"no \*\.safetensors files; download"):
        load_model(str(directory))
    (directory / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"it has pytorch_model\.bin: convert"):
        load_model(str(directory))


def test_damaged_json(directory: Path) -> None:
    (directory / "generation_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"generation_config\.json: not valid JSON"):
        load_model(str(directory))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 5]}))
    hugging_face.edit_config(directory, eos_token_id=7)
    assert load_model(str(directory), dtype=torch.float32).eos_token_ids == {3, 5, 7}
    (directory / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match="expected a JSON object, found list"):
        load_model(str(directory))


def test_a_directory_in_the_place_of_a_file(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.unlink()
    path.mkdir()
    with pytest.raises(
        ValueError, match=r"model\.safetensors: cannot be read: .*of the right kind"
    ):
        load_model(str(directory))


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "model.safetensors.index.json"]
)
def test_files_without_permission(
    directory: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name.endswith("index.json"):
        (directory / name).write_text("{}")

    def forbid(owner: Any, method: str) -> None:
        real = getattr(owner, method)

        def refuse(path: Any, *arguments: Any, **options: Any) -> Any:
            if str(path).endswith(name):
                raise PermissionError(13, "Permission denied", str(path))
            return real(path, *arguments, **options)

        monkeypatch.setattr(owner, method, refuse)

    forbid(Path, "open")
    forbid(Path, "read_text")
    forbid(safetensors, "safe_open")
    with pytest.raises(ValueError, match=rf"{name}: .*Permission denied; see .* may read it"):
        load_model(str(directory))


def test_an_index_nested_too_deep(directory: Path) -> None:
    (directory / "model.safetensors.index.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"index\.json: not a valid index"):
        load_model(str(directory))
