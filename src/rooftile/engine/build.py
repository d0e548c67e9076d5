"""From a configuration to a running core: load the model, size the KV memory, wire the parts."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rooftile.engine.config import EngineConfig
from rooftile.engine.core import EngineCore, Limits
from rooftile.engine.memory import Demand, check_kv_memory, free_memory_bytes, pages_that_fit
from rooftile.engine.runner import Runner
from rooftile.kvcache.cache import KVCache
from rooftile.kvcache.spec import group_layers
from rooftile.kvcache.storage import KVStorage
from rooftile.models import native
from rooftile.models.loader import LoadedModel, load_model
from rooftile.models.native import NativeStep


def build_engine(
    config: EngineConfig, on_progress: Callable[[str, float], None] | None = None
) -> tuple[LoadedModel, EngineCore]:
    device = torch.device("cpu")
    model = load_model(
        config.model,
        dtype=None if config.dtype == "auto" else getattr(torch, config.dtype),
        device=device,
        random_weights=config.random_weights,
        seed=config.seed,
        max_model_len=config.max_model_len,
        quantization=config.quantization,
        on_progress=on_progress,
    )
    max_model_len = model.config.max_position
    groups = group_layers(model.decoder.kv_specs)
    windows = [group.spec.window for group in groups]
    demand = Demand(
        config.page_size,
        config.max_num_seqs,
        max_model_len,
        max_step_tokens=min(config.max_num_batched_tokens, max_model_len),
    )
    most_pages = demand.pages(windows)
    if config.num_pages is None:
        memory_bytes = int(free_memory_bytes() * config.kv_memory_share)
        pages = pages_that_fit(groups, config.page_size, memory_bytes, most_pages)
    else:
        pages = [
            config.num_pages if window is None else min(config.num_pages, most)
            for window, most in zip(windows, most_pages, strict=True)
        ]
    row_pages = -(-max_model_len // config.page_size)
    check_kv_memory(groups, pages, config.page_size, config.max_num_seqs, row_pages)
    # The native step is faster at every size that it can run.
    runner = Runner(
        NativeStep(model.decoder) if native.refusal(model.decoder) is None else model.decoder,
        KVStorage(groups, pages, config.page_size, device),
        page_size=config.page_size,
        max_rows=config.max_num_seqs,
        max_pages_per_row=row_pages,
        device=device,
    )
    cache = KVCache(len(groups), pages, config.page_size, config.prefix_cache, windows)
    limits = Limits(
        vocab_size=model.config.vocab_size,
        max_model_len=max_model_len,
        kv_tokens=demand.tokens_kept(windows, pages),
        max_num_seqs=config.max_num_seqs,
    )
    return model, EngineCore(config, runner, cache, limits, model.eos_token_ids)
