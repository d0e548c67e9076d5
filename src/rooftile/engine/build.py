"""From a configuration to a running core: load the model, size the KV memory, wire the parts."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import torch

from rooftile.engine.config import EngineConfig
from rooftile.engine.core import EngineCore
from rooftile.engine.device_memory import check_weights, kv_bytes, measured, out_of_memory
from rooftile.engine.device_runner import DeviceRunner
from rooftile.engine.limits import Limits
from rooftile.engine.memory import Demand, check_kv_memory, free_memory_bytes, pages_that_fit
from rooftile.engine.runner import SCORED_ROWS, Runner
from rooftile.kvcache.cache import KVCache
from rooftile.kvcache.spec import KVGroup, group_layers
from rooftile.kvcache.storage import KVStorage
from rooftile.models import native
from rooftile.models.decoder import Decoder
from rooftile.models.loader import LoadedModel, load_model
from rooftile.models.native import NativeStep
from rooftile.ops.dual_chunk_rotary import DualChunkConfig

logger = logging.getLogger(__name__)

Report = Callable[[str, float], None]
LOADED = 0.7  # share of a start on a GPU that loading takes


def build_engine(
    config: EngineConfig, on_progress: Report | None = None
) -> tuple[LoadedModel, EngineCore]:
    """Raises ValueError for a model that cannot be read, and for memory that is not there."""
    report = on_progress or (lambda phase, share: None)
    device = torch.device(config.device_type)
    config = config.resolved(device.type)
    on_gpu = device.type == "cuda"
    if on_gpu:
        device = torch.device("cuda", torch.cuda.current_device())
    with out_of_memory(config, "the weights"):
        model = load_model(
            config.model,
            dtype=None if config.dtype == "auto" else getattr(torch, config.dtype),
            device=device,
            random_weights=config.random_weights,
            seed=config.seed,
            max_model_len=config.max_model_len,
            dual_chunk=None if config.dual_chunk is None else DualChunkConfig.of(config.dual_chunk),
            quantization=config.quantization,
            generation_config=config.generation_config,
            on_progress=lambda phase, share: report(phase, share * LOADED if on_gpu else share),
            check=check_weights if on_gpu else None,
        )
    max_model_len = model.config.max_position
    groups = group_layers(model.decoder.kv_specs)
    windows = [group.spec.window for group in groups]
    assert config.max_num_batched_tokens is not None
    demand = Demand(
        config.page_size,
        config.max_num_seqs,
        max_model_len,
        max_step_tokens=min(config.max_num_batched_tokens, max_model_len),
    )
    build = _gpu_runner if on_gpu else _cpu_runner
    runner, pages = build(config, model.decoder, groups, demand, device, report)
    # KV that depends on the whole prompt's length is no other prompt's.
    shares = config.prefix_cache and not model.config.depends_on_prompt_length
    cache = KVCache(len(groups), pages, config.page_size, shares, windows)
    limits = Limits(
        vocab_size=model.config.vocab_size,
        max_model_len=max_model_len,
        kv_tokens=demand.tokens_kept(windows, pages),
        max_num_seqs=config.max_num_seqs,
    )
    logger.info("KV memory holds %d tokens", limits.kv_tokens)
    return model, EngineCore(config, runner, cache, limits, model.eos_token_ids)


def _cpu_runner(
    config: EngineConfig,
    decoder: Decoder,
    groups: Sequence[KVGroup],
    demand: Demand,
    device: torch.device,
    report: Report,
) -> tuple[Runner, list[int]]:
    assert config.kv_memory_share is not None
    pages = _pages(config, groups, demand, lambda share: int(free_memory_bytes() * share))
    row_pages = demand.pages_per_sequence(None)
    check_kv_memory(groups, pages, config.page_size, config.max_num_seqs, row_pages)
    runner = Runner(
        # The native step is faster at every size that it can run.
        NativeStep(decoder) if native.refusal(decoder) is None else decoder,
        KVStorage(groups, pages, config.page_size, device),
        page_size=config.page_size,
        max_rows=config.max_num_seqs,
        max_pages_per_row=row_pages,
        device=device,
    )
    return runner, pages


def _gpu_runner(
    config: EngineConfig,
    decoder: Decoder,
    groups: Sequence[KVGroup],
    demand: Demand,
    device: torch.device,
    report: Report,
) -> tuple[DeviceRunner, list[int]]:
    """Warm up on a page a group, then give the pages what is really free, then capture."""
    assert config.max_num_batched_tokens is not None
    with out_of_memory(config, "a step"):
        runner = DeviceRunner(
            decoder,
            groups,
            page_size=config.page_size,
            max_rows=config.max_num_seqs,
            max_pages_per_row=demand.pages_per_sequence(None),
            max_tokens=min(
                config.max_num_batched_tokens, config.max_num_seqs * demand.max_model_len
            ),
            device=device,
        )
        runner.attach(KVStorage(groups, [1] * len(groups), config.page_size, device))
        report("warming up", LOADED)
        peak = measured(device, runner.warm_up)
    with out_of_memory(config, "the KV pages"):
        sampled = max(config.max_num_seqs, SCORED_ROWS) * decoder.config.vocab_size
        pages = _pages(config, groups, demand, lambda share: kv_bytes(device, share, peak, sampled))
        runner.attach(KVStorage(groups, pages, config.page_size, device))
    reason = runner.cannot_capture() if config.cuda_graphs else "cuda_graphs is off"
    if reason is not None:
        logger.info("no CUDA graphs: %s", reason)
        return runner, pages
    start = time.monotonic()
    phase = f"capturing CUDA graphs for {runner.capacities}"
    with out_of_memory(config, "the CUDA graphs"):
        runner.capture(lambda share: report(phase, 0.8 + 0.2 * share))
    logger.info("%s took %.1f s", phase, time.monotonic() - start)
    return runner, pages


def _pages(
    config: EngineConfig,
    groups: Sequence[KVGroup],
    demand: Demand,
    memory_bytes: Callable[[float], int],
) -> list[int]:
    """Pages of each group: as configured, or as many as fit."""
    windows = [group.spec.window for group in groups]
    most_pages = demand.pages(windows)
    if config.num_pages is None:
        assert config.kv_memory_share is not None
        free = memory_bytes(config.kv_memory_share)
        return pages_that_fit(groups, config.page_size, free, most_pages)
    return [
        config.num_pages if window is None else min(config.num_pages, most)
        for window, most in zip(windows, most_pages, strict=True)
    ]
