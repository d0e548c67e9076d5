"""An engine that stands still, in the middle of its work, until a test lets it go on."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

SECONDS = 120.0  # after which something hangs, however slow the machine is


@dataclass(frozen=True)
class Gate:
    """A logits processor that holds the engine up in a step, whichever process it runs in.

    path: the gate is shut as long as this file exists. after: tokens that a sample has before.
    """

    path: str
    after: int

    def __call__(self, output_ids: Sequence[int], logits: Tensor) -> Tensor:
        if len(output_ids) >= self.after:
            wait_until(lambda: not os.path.exists(self.path))
        return logits

    def open(self) -> None:
        """Idempotent."""
        Path(self.path).unlink(missing_ok=True)


@contextmanager
def shut_gate(after: int = 1) -> Iterator[Gate]:
    """A gate that is open at the end at the latest."""
    with tempfile.NamedTemporaryFile(delete=False) as file:
        gate = Gate(file.name, after)
    try:
        yield gate
    finally:
        gate.open()


def wait_until(condition: Callable[[], bool], seconds: float = SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it does not come"
        time.sleep(0.005)
