"""From the name of a model to something that computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rooftile.distributed.group import ParallelGroup
from rooftile.models.build import build_decoder, rotary_tables
from rooftile.models.checkpoint import Checkpoint
from rooftile.models.config import DecoderConfig
from rooftile.models.decoder import Decoder
from rooftile.models.dual_chunk import with_dual_chunk
from rooftile.models.families import Fields, family_of_config, family_of_gguf
from rooftile.models.families.family import Family
from rooftile.models.families.fields import LARGEST
from rooftile.models.families.gguf_common import ROPE_TENSORS
from rooftile.models.gguf import GGUFFile, read_gguf
from rooftile.models.gguf_tokenizer import tokenizer_from_gguf
from rooftile.models.gguf_weights import GGUFWeights
from rooftile.models.places import Place, check_places, places
from rooftile.models.random_weights import RandomWeights
from rooftile.models.resolve import ModelFiles, readable, resolve
from rooftile.models.sampling_defaults import sampling_of_generation_config, sampling_of_gguf
from rooftile.models.tokenizer import Tokenizer, read_json, tokenizer_from_directory
from rooftile.models.weights import WeightSource, num_parameters
from rooftile.ops.dual_chunk_rotary import DualChunkConfig
from rooftile.ops.rotary_table import DynamicScaling
from rooftile.planning.memory import check_memory

# Tokens that end a turn wherever a vocabulary has them as special tokens.
END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>")
GGUF_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
QUANTISED_BITS = {"int8": 8, "int4": 4}
FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run.

    eos_token_ids: any of them ends an answer. sampling_defaults: fields of SamplingParams that its
    authors recommend.
    """

    name: str
    config: DecoderConfig
    decoder: Decoder
    tokenizer: Tokenizer | None
    eos_token_ids: frozenset[int]
    sampling_defaults: Mapping[str, float]


@dataclass(frozen=True)
class _Description:
    """Everything about a model but its weights: `names` are the checkpoint's, `source` opens it."""

    config: DecoderConfig
    tokenizer: Tokenizer | None
    eos_token_ids: frozenset[int]
    sampling_defaults: Mapping[str, float]
    names: Mapping[str, str]
    source: Callable[[dict[str, Place]], Checkpoint | GGUFWeights]


def load_model(
    model: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    random_weights: bool = False,
    seed: int = 0,
    max_model_len: int | None = None,
    dual_chunk: DualChunkConfig | None = None,
    parallel: ParallelGroup | None = None,
    quantization: str = "none",
    generation_config: bool = True,
    on_progress: Callable[[str, float], None] | None = None,
    check: Callable[[str, int], None] | None = None,
) -> LoadedModel:
    """Find, read, shard and pack a model.

    model: a .gguf file, a directory in Hugging Face format, a hub id, or "demo".
    dtype: of weights and activations; `None`: bfloat16 on a GPU and on CPUs that compute in it,
        else float32.
    random_weights: only the configuration is read; weights are random, from `seed`.
    max_model_len: tokens per sequence, at most what the model was made for. Dynamic scaling and
        LongRoPE (Phi-3) go by it, never by a request: up to the original context short divisors.
        With dual chunk attention there is no such limit.
    dual_chunk: dual chunk attention instead of the model's own, if it has any.
    quantization: "none", "int8" or "int4": of the matrices, while they are read; embedding and head
        get 8 bits. A GGUF's own blocks are taken over where they fit.
    generation_config: whether to read the sampling that the model's authors recommend.
    parallel: this process's place in a tensor-parallel group; it reads only its share.
    on_progress: told the phase's name and the share of the whole that is done, 0 to 1.
    check: told the model and its bytes before they are read; raises where the device cannot hold them.

    Raises:
        ValueError: a model that cannot be found, is not supported, is damaged or does not fit
            together, or that does not split over the group; says what and what to do.
        NotImplementedError: a variant of the architecture that is not supported.
    """
    report = on_progress or (lambda phase, share: None)
    report("finding the model", 0.0)
    files = resolve(model, need_weights=not random_weights)
    report("reading configuration and tokenizer", 0.02)
    with readable(str(files.path)):
        describe = _describe_gguf if files.is_gguf else _describe_directory
        description = describe(files, generation_config)
    config = description.config
    if dual_chunk is not None:
        config = with_dual_chunk(config, dual_chunk, files.name)
    config = _with_length(config, max_model_len, files.name)
    dtype = dtype or default_dtype(device)
    if dtype not in FLOAT_DTYPES:
        raise ValueError(f"dtype is {dtype}; choose one of {', '.join(map(str, FLOAT_DTYPES))}")
    if torch.device(device).type == "cpu":
        _check_size(config, dtype, quantization, parallel or ParallelGroup(), str(files.path))
    if check is not None:
        size = parallel.size if parallel is not None else 1
        check(files.name, num_parameters(config) * dtype.itemsize // size)
    if random_weights:
        source: WeightSource = RandomWeights(config, seed)
    else:
        wanted = places(config, description.names)
        with readable(str(files.path)):
            source = stored = description.source(wanted)
        check_places(wanted, stored.shapes, stored.unexpected, str(files.path))
    decoder = build_decoder(
        config,
        source,
        dtype=dtype,
        device=device,
        group=parallel,
        quantization=quantization,
        on_progress=lambda share: report("loading weights", 0.1 + 0.9 * share),
    )
    return LoadedModel(
        files.name,
        config,
        decoder,
        description.tokenizer,
        description.eos_token_ids,
        description.sampling_defaults,
    )


def default_dtype(device: torch.device | str) -> torch.dtype:
    """bfloat16 on a GPU and on CPUs with instructions for it, else float32."""
    if torch.device(device).type != "cpu":
        return torch.bfloat16
    fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if fast else torch.float32


def _describe_directory(files: ModelFiles, with_sampling: bool) -> _Description:
    path = files.path / "config.json"
    fields = Fields(read_json(path), str(path))
    family = family_of_config(fields)
    config = family.config(fields)
    tokenizer = tokenizer_from_directory(files.path)
    generation_path = files.path / "generation_config.json"
    generation = read_json(generation_path)
    ids = {
        *_ids(fields.get("eos_token_id"), path),
        *_ids(generation.get("eos_token_id"), generation_path),
    }
    ignored = frozenset({"lm_head.weight"} if config.tie_embeddings else ())
    return _Description(
        config,
        tokenizer,
        _eos_ids(ids, tokenizer, config.vocab_size),
        sampling_of_generation_config(generation, generation_path) if with_sampling else {},
        family.hf_names,
        lambda found: Checkpoint(files.path, found, ignored),
    )


def _describe_gguf(files: ModelFiles, with_sampling: bool) -> _Description:
    file = read_gguf(files.path)
    family = family_of_gguf(Fields(file.metadata, str(file.path)))
    assert family.gguf_config is not None
    fields = Fields(file.metadata, str(file.path), prefix=f"{family.gguf_architecture}.")
    config = family.gguf_config(file, fields)
    tokenizer = tokenizer_from_gguf(file)
    ids = {
        token_id
        for key in GGUF_EOS_KEYS
        for token_id in _ids(file.metadata.get(f"tokenizer.ggml.{key}"), file.path)
    }
    return _Description(
        config,
        tokenizer,
        _eos_ids(ids, tokenizer, config.vocab_size),
        sampling_of_gguf(file.metadata, file.path) if with_sampling else {},
        family.gguf_names,
        lambda found: _gguf_source(file, family, config, found),
    )


def _gguf_source(
    file: GGUFFile, family: Family, config: DecoderConfig, found: dict[str, Place]
) -> GGUFWeights:
    interleaved: dict[str, int] = {}
    if family.gguf_interleaved:
        for index, layer in enumerate(config.layers):
            heads = {"q": layer.attention.num_heads, "k": layer.attention.num_kv_heads}
            for name, count in heads.items():
                interleaved[f"layers.{index}.{name}"] = count
                interleaved[f"layers.{index}.{name}.bias"] = count
    return GGUFWeights(
        file,
        found,
        interleaved=interleaved,
        norm_offset=config.norm_offset,
        ignored=frozenset(ROPE_TENSORS),
    )


def _with_length(config: DecoderConfig, length: int | None, name: str) -> DecoderConfig:
    if length is None:
        return config
    most = config.max_position
    for layer in config.layers:
        rotary = layer.attention.rotary
        if rotary is not None and isinstance(rotary.scaling, DynamicScaling):
            most = max(most, int(rotary.scaling.factor * rotary.scaling.original_max_position))
        if layer.attention.dual_chunk is not None:
            most = LARGEST
    if not 1 <= length <= most:
        raise ValueError(f"max_model_len is {length}; {name} takes 1 to {most} tokens per sequence")
    return replace(config, max_position=length)


def _check_size(
    config: DecoderConfig, dtype: torch.dtype, quantization: str, group: ParallelGroup, where: str
) -> None:
    """Refuse a model that this machine can never hold; ValueError."""
    tables = rotary_tables(config)
    bits = QUANTISED_BITS.get(quantization, 8 * dtype.itemsize)
    check_memory(
        f"{where}: a model of {len(config.layers)} layers, hidden size {config.hidden} and "
        f"vocabulary size {config.vocab_size}",
        num_parameters(config) * bits // (8 * group.size),
        "check these fields, or take a smaller dtype or model",
    )
    check_memory(
        f"{where}: a context of {max((n for _, n in tables), default=0)} positions",
        sum(4 * length * rotary.dim for rotary, length in tables),
        "check the field of the configuration, or lower max_model_len or dual_chunk's chunk_size",
    )


def _ids(value: Any, where: Path) -> list[int]:
    """eos_token_id may be absent, one id, or a list."""
    ids = [item for item in (value if isinstance(value, list) else [value]) if item is not None]
    for item in ids:
        if not isinstance(item, int) or isinstance(item, bool):
            raise ValueError(
                f"{where}: eos_token_id is {value!r:.80}; it must be a token id or a list of them"
            )
    return ids


def _eos_ids(ids: set[int], tokenizer: Tokenizer | None, vocab_size: int) -> frozenset[int]:
    if tokenizer is not None:
        if not ids and tokenizer.eos_token_id is not None:
            ids = {tokenizer.eos_token_id}
        turns = {tokenizer.token_to_id(token) for token in END_OF_TURN}
        ids = ids | (tokenizer.special_ids & turns)
    # Some configurations say -1 for none; what has no logit cannot be sampled, nor be kept from it.
    return frozenset(token_id for token_id in ids if 0 <= token_id < vocab_size)
