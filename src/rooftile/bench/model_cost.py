"""The least time that a machine needs for a whole workload: the roofline summed over a model."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from rooftile.bench.workloads import Request
from rooftile.models.config import DecoderConfig, MoeSpec
from rooftile.planning.hardware import Machine
from rooftile.planning.roofline import Bound, Work, attention_work, least_time, linear_work

# Bytes of a weight's number with its share of the scales: in the layers, and in the head. The least:
# of weights that Rooftile quantises to int4 itself, some stay in 8 bits.
WEIGHT_BYTES = {"none": (None, None), "int8": (1.0, 34 / 32), "int4": (20 / 32, 34 / 32)}


def least_seconds(
    config: DecoderConfig, requests: Sequence[Request], machine: Machine, quantization: str = "none"
) -> Bound | None:
    """All prompts in one step, then one step per new token of all requests that still run.

    Weights, of 2 bytes or quantised, and KV of 2 bytes are read once a step. `None` where requests
    share KV, of which a clever engine reads less than this counts.
    """
    starts = {request.prompt_token_ids[:16] for request in requests}
    if len(starts) < len(requests) or any(request.n > 1 for request in requests):
        return None
    seconds: defaultdict[str, float] = defaultdict(float)
    for q_lens, kv_lens in _steps(requests):
        for work, count in _step_work(config, q_lens, kv_lens, quantization):
            bound = least_time(work, machine)
            seconds[bound.unit] += count * bound.seconds
    return Bound(sum(seconds.values()), max(seconds, key=lambda unit: seconds[unit]))


def _steps(requests: Sequence[Request]) -> Iterator[tuple[list[int], list[int]]]:
    """Query and KV lengths of each step."""
    prompts = [len(request.prompt_token_ids) for request in requests]
    yield prompts, prompts
    for done in range(1, max(request.max_tokens for request in requests)):
        kv_lens = [
            length + done
            for length, request in zip(prompts, requests, strict=True)
            if request.max_tokens > done
        ]
        yield [1] * len(kv_lens), kv_lens


def _step_work(
    config: DecoderConfig, q_lens: list[int], kv_lens: list[int], quantization: str
) -> Iterator[tuple[Work, int]]:
    """Work of each operator call, and how many times it happens."""
    tokens, hidden = sum(q_lens), config.hidden
    of_layers, of_head = WEIGHT_BYTES[quantization]

    def linear(in_features: int, out_features: int) -> Work:
        return linear_work(tokens, in_features, out_features, quantised_bytes=of_layers)

    for layer, count in Counter(config.layers).items():
        spec, size = layer.attention, layer.mlp.intermediate
        q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        yield linear(hidden, q_size + 2 * kv_size), count
        # A window lets a layer read less; what it surely reads is the window.
        seen = kv_lens if spec.window is None else [min(n, spec.window + 1) for n in kv_lens]
        asked = [min(q, kv) for q, kv in zip(q_lens, seen, strict=True)]
        yield (
            attention_work(
                asked,
                seen,
                num_q_heads=spec.num_heads,
                num_kv_heads=spec.num_kv_heads,
                k_dim=spec.head_dim,
                v_dim=spec.head_dim,
            ),
            count,
        )
        yield linear(q_size, hidden), count
        if isinstance(layer.mlp, MoeSpec):
            yield linear(hidden, layer.mlp.num_experts), count
            # The least weights that are read: where all tokens choose the same experts.
            count *= layer.mlp.top_k
        yield linear(hidden, 2 * size), count
        yield linear(size, hidden), count
    yield linear_work(len(q_lens), hidden, config.vocab_size, quantised_bytes=of_head), 1
