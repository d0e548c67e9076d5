"""A cooperative scheduler of tasks, deterministic for a seed and adversarial by choice.

Tasks are threads of which exactly one runs at a time; they hand control back wherever a GPU could
switch between warps: at barriers, copies and waits. Events are things that the hardware does on
its own, such as a copy that completes.
"""

from __future__ import annotations

import random
import threading
import traceback
from collections.abc import Callable
from typing import Any

from tests.support.gluon_sim.errors import Deadlock, SimulationError

POLICIES = ("uniform", "events late", "events early", "sticky", "starve one task")


class _Stopped(BaseException):
    """Unwinds the tasks that are left when another one failed."""


class Task:
    def __init__(self, name: str, body: Callable[[], None], context: Any) -> None:
        self.name = name
        self.context = context
        self.ready: Callable[[], bool] | None = None
        self.waits_for = ""
        self.where = ""
        self.done = False
        self.error: BaseException | None = None
        self.resume = threading.Semaphore(0)
        self.thread = threading.Thread(target=self._run, args=(body,), daemon=True)

    def _run(self, body: Callable[[], None]) -> None:
        self.resume.acquire()
        _local.task = self
        try:
            if not self.scheduler.stopping:
                body()
        except _Stopped:
            pass
        except BaseException as error:
            self.error = error
        self.done = True
        self.scheduler.control.release()

    scheduler: Scheduler


_local = threading.local()


def current_task() -> Task:
    task: Task = _local.task
    return task


class Scheduler:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.policy = POLICIES[seed % len(POLICIES)]
        self.tasks: list[Task] = []
        self.events: list[Callable[[], None]] = []
        self.control = threading.Semaphore(0)
        self.stopping = False
        self.on_task_done: Callable[[Task], None] = lambda task: None
        self._last: Task | None = None
        self._starved = self.random.randrange(1, 6)

    def add(self, task: Task) -> None:
        task.scheduler = self
        self.tasks.append(task)
        task.thread.start()

    def pause(self, ready: Callable[[], bool] | None = None, waits_for: str = "") -> None:
        """Called by a task: lets others run, and returns once `ready()` holds."""
        task = current_task()
        task.ready, task.waits_for = ready, waits_for
        if waits_for:
            task.where = _kernel_frame()
        self.control.release()
        task.resume.acquire()
        if self.stopping:
            raise _Stopped
        task.ready, task.waits_for = None, ""

    def run(self) -> None:
        """Runs every task to its end, or raises what the first failing one raised."""
        try:
            while self.tasks:
                self._step()
        finally:
            self.stopping = True
            for task in self.tasks:
                task.resume.release()
                task.thread.join()

    def _step(self) -> None:
        able = [t for t in self.tasks if t.ready is None or t.ready()]
        if self.events and (not able or self._event_is_due()):
            self.events.pop(self.random.randrange(len(self.events)))()
            return
        if not able:
            lines = "\n".join(f"  {t.name}: {t.waits_for} at {t.where}" for t in self.tasks)
            raise Deadlock(f"every role waits and no copy is in flight:\n{lines}")
        task = self._choose(able)
        self._last = task
        task.resume.release()
        self.control.acquire()
        if task.error is not None:
            self.tasks.remove(task)
            raise task.error
        if task.done:
            self.tasks.remove(task)
            self.on_task_done(task)

    def _event_is_due(self) -> bool:
        if self.policy == "events late":
            return False
        return self.policy == "events early" or self.random.random() < 0.3

    def _choose(self, able: list[Task]) -> Task:
        if self.policy == "sticky" and self._last in able and self.random.random() < 0.9:
            assert self._last is not None
            return self._last
        if self.policy == "starve one task":
            favoured = [t for t in able if self.tasks.index(t) % 5 != self._starved % 5]
            able = favoured or able
        return self.random.choice(able)


def _kernel_frame() -> str:
    """The innermost frames outside the simulator: where in the kernel a task stands."""
    frames = [f for f in traceback.extract_stack() if "gluon_sim" not in f.filename]
    frames = [f for f in frames if "threading" not in f.filename]
    return " < ".join(f"{f.name}:{f.lineno}" for f in reversed(frames[-3:]))


__all__ = ["Deadlock", "Scheduler", "SimulationError", "Task", "current_task"]
