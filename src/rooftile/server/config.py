"""Settings of the server, apart from those of its engine."""

from __future__ import annotations

import math
from dataclasses import dataclass

ENGINES = ("auto", "thread", "process")


@dataclass(frozen=True)
class ServerConfig:
    """Settings of the server, checked on construction.

    model_names: what clients may call the model; the first is its name in answers. Empty: the name
        it was asked for by.
    api_keys: any of them opens the /v1, /tokenize and /detokenize endpoints; empty: no key needed.
    engine: where the engine runs: "thread" of this process, "process" of its own, or "auto" (a
        thread on a CPU).
    max_queue: sequences (prompts x n) that may wait behind the engine's max_num_seqs; more are
        refused with 429.
    max_body_bytes: a longer request body is refused with 413.
    max_logprobs: most likely tokens that a client may ask for with each token.
    body_seconds: a client that takes longer to send its request's body is refused.
    drain_seconds: on SIGTERM, open requests may take so long to finish before they are ended.
    log_prompts: write prompts to the log; otherwise it holds no text of anybody's.
    """

    model_names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    engine: str = "auto"
    max_queue: int = 1024
    max_body_bytes: int = 8 * 2**20
    max_logprobs: int = 20
    body_seconds: float = 60.0
    drain_seconds: float = 10.0
    log_prompts: bool = False

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise ValueError(f"engine is {self.engine!r}; choose one of {', '.join(ENGINES)}")
        for name, low in (
            ("max_queue", 0),
            ("max_body_bytes", 1),
            ("max_logprobs", 0),
            ("body_seconds", 0),
            ("drain_seconds", 0),
        ):
            value = getattr(self, name)
            if not low <= value < math.inf:
                raise ValueError(f"{name} is {value!r}; it must be a number of at least {low}")
        for name in ("model_names", "api_keys"):
            if "" in getattr(self, name):
                raise ValueError(f"{name} has an empty string")
