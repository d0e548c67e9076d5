"""How far a long run is: a bar on a terminal, a line now and then in a pipe."""

from __future__ import annotations

import sys
import time
from types import TracebackType

SECONDS_BETWEEN_LINES = 30.0
SECONDS_BETWEEN_UPDATES = 0.2


class RunProgress:
    """Counts of the whole input; rates and the time left from this run alone."""

    def __init__(self, total: int, done: int, failed: int) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        self.total, self.done, self.failed = total, done, failed
        self.tokens = 0
        self.first_error: str | None = None  # of this run
        self._done_before = done
        self._started = self._shown = self._printed = time.monotonic()
        console = Console(stderr=True)
        self._is_terminal = console.is_terminal
        self._bar = Progress(
            TextColumn("generating"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[failed]} failed"),
            TextColumn("{task.fields[rate]:.0f} tokens/s"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            disable=not self._is_terminal,
            speed_estimate_period=300,
        )
        self._task = self._bar.add_task("", total=total, completed=done, failed=failed, rate=0.0)

    def __enter__(self) -> RunProgress:
        self._started = self._printed = time.monotonic()
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._show()
        self._bar.stop()

    def finished_line(self, error: str | None) -> None:
        """error: what went wrong with the line, if anything did."""
        self.done += 1
        if error is not None:
            self.failed += 1
            self.first_error = self.first_error or error

    def is_due(self) -> bool:
        """Whether it is time for `update`, which is not worth its cost at every step."""
        return time.monotonic() - self._shown >= SECONDS_BETWEEN_UPDATES

    def update(self, tokens: int) -> None:
        """tokens: generated since the start of this run."""
        self.tokens = tokens
        self._shown = time.monotonic()
        self._show()
        if not self._is_terminal and self._shown - self._printed >= SECONDS_BETWEEN_LINES:
            self._printed = self._shown
            print(f"{self.summary()}{self._time_left()}", file=sys.stderr, flush=True)

    def summary(self) -> str:
        return (
            f"{self.done} of {self.total} lines done, {self.failed} failed; "
            f"{self.tokens} new tokens, {self._rate():.0f} tokens/s"
        )

    def _show(self) -> None:
        self._bar.update(self._task, completed=self.done, failed=self.failed, rate=self._rate())

    def _rate(self) -> float:
        return self.tokens / max(time.monotonic() - self._started, 1e-6)

    def _time_left(self) -> str:
        now_done = self.done - self._done_before
        if not now_done:
            return ""
        elapsed = time.monotonic() - self._started
        minutes = elapsed / now_done * (self.total - self.done) / 60
        return f"; about {minutes:.0f} min left"
