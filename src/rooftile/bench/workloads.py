"""Workloads of the engine benchmark: random token ids, outputs of fixed length.

The large ones are the serving workloads that GPU engines are compared on; the `cpu` ones are small
enough for two cores. Same name, vocabulary and seed, same requests.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Request:
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    n: int = 1


@dataclass(frozen=True)
class Workload:
    """measure: "prefill" counts prompt tokens, "output" new ones, "total" both, per second."""

    name: str
    what: str
    measure: str
    temperature: float
    make: Callable[[_Draw, int | None], list[Request]]

    def requests(
        self, vocab: int, *, seed: int = 0, num_requests: int | None = None, scale: float = 1.0
    ) -> list[Request]:
        """num_requests: instead of the workload's own; scale: multiplies every length."""
        if not 0 < scale <= 1:
            raise ValueError(f"scale is {scale}; it must be above 0 and at most 1")
        if num_requests is not None and num_requests < 1:
            raise ValueError(f"num_requests is {num_requests}; it must be at least 1")
        return self.make(_Draw(vocab, seed, scale), num_requests)


class _Draw:
    def __init__(self, vocab: int, seed: int, scale: float) -> None:
        # Special tokens sit at both ends of a vocabulary.
        self._low, self._high = (10, vocab - 2000) if vocab > 4000 else (0, vocab)
        self._random = random.Random(seed)
        self._scale = scale

    def length(self, low: int, high: int | None = None) -> int:
        drawn = low if high is None else self._random.randint(low, high)
        return max(1, round(drawn * self._scale))

    def tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._random.randrange(self._low, self._high) for _ in range(count))


def _fixed(
    count: int, prompt: tuple[int, ...], output: tuple[int, ...], n: int = 1
) -> Callable[[_Draw, int | None], list[Request]]:
    """`count` requests; prompt and output are a length or a range of lengths."""

    def make(draw: _Draw, num_requests: int | None) -> list[Request]:
        return [
            Request(draw.tokens(draw.length(*prompt)), draw.length(*output), n)
            for _ in range(num_requests or count)
        ]

    return make


def _prefix(draw: _Draw, num_requests: int | None) -> list[Request]:
    shared = draw.tokens(draw.length(2048))
    return [
        Request(shared + draw.tokens(draw.length(64)), draw.length(128))
        for _ in range(num_requests or 256)
    ]


WORKLOADS = {
    w.name: w
    for w in (
        Workload("prefill512", "one prompt of 512 tokens", "prefill", 0.0, _fixed(1, (512,), (1,))),
        Workload(
            "decode1", "1 request, 16 tokens in, 128 out", "output", 0.0, _fixed(1, (16,), (128,))
        ),
        Workload(
            "decode8", "8 requests, 16 tokens in, 128 out", "output", 0.0, _fixed(8, (16,), (128,))
        ),
        Workload(
            "decode32",
            "32 requests, 16 tokens in, 128 out",
            "output",
            0.0,
            _fixed(32, (16,), (128,)),
        ),
        Workload(
            "nano",
            "256 requests, 100 to 1024 in, 100 to 1024 out",
            "output",
            0.6,
            _fixed(256, (100, 1024), (100, 1024)),
        ),
        Workload("prefix", "256 requests, 2048 shared + 64 own in, 128 out", "total", 0.6, _prefix),
        Workload(
            "parallel",
            "32 prompts of 512, 8 answers of 256 each",
            "output",
            0.6,
            _fixed(32, (512,), (256,), 8),
        ),
        Workload("single", "1 request, 512 in, 256 out", "output", 0.6, _fixed(1, (512,), (256,))),
        Workload("prefill", "64 prompts of 8192, 16 out", "total", 0.6, _fixed(64, (8192,), (16,))),
    )
}
CPU = ("prefill512", "decode1", "decode8", "decode32")
GPU = ("nano", "prefix", "parallel", "single", "prefill")
SETS = {"cpu": CPU, "gpu": GPU}


def select(names: list[str]) -> list[Workload]:
    """Workloads by name, in order; "cpu" stands for the four small ones, "gpu" for the large ones."""
    chosen: list[Workload] = []
    for name in names:
        members = SETS.get(name, (name,))
        for member in members:
            if member not in WORKLOADS:
                raise ValueError(
                    f"there is no workload {member!r}; choose from cpu, gpu, {', '.join(WORKLOADS)}"
                )
            chosen.append(WORKLOADS[member])
    return chosen
