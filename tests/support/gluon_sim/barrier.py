"""Barriers of the simulated machine."""

from __future__ import annotations

from tests.support.gluon_sim.errors import SimulationError
from tests.support.gluon_sim.memory import SharedTile


class MBarrier:
    """An mbarrier: a phase completes when its arrivals and transaction bytes are all in."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.count = 0
        self.phase = 0
        self.pending = 0
        self.bytes = 0
        self.guards: tuple[SharedTile, ...] = ()  # turned to NaN whenever a phase completes

    def init(self, count: int) -> None:
        self.count = self.pending = count

    def arrive(self, count: int = 1, expected_bytes: int = 0) -> None:
        if self.count == 0:
            raise SimulationError(f"{self.name} is used before mbarrier.init")
        self.bytes += expected_bytes
        self.pending -= count
        if self.pending < 0:
            raise SimulationError(f"{self.name}: more arrivals than its count of {self.count}")
        self._advance()

    def deliver(self, num_bytes: int) -> None:
        self.bytes -= num_bytes
        self._advance()

    def passed(self, parity: int) -> bool:
        """Whether the phase of this parity is complete (the hardware's test_wait)."""
        return self.phase % 2 != int(parity)

    def _advance(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.phase += 1
            self.pending = self.count
            for tile in self.guards:
                tile.poison()


class MBarrierLayout:
    """Of memory that barriers lie in."""


class MBarriers:
    """[n, 1] barriers in shared memory."""

    def __init__(self, name: str, count: int) -> None:
        self.barriers = [MBarrier(f"{name}[{i}]") for i in range(count)]

    def index(self, i: int) -> MBarrier:
        if not 0 <= int(i) < len(self.barriers):
            raise SimulationError(f"barrier {i} of {len(self.barriers)}")
        return self.barriers[int(i)]


class NamedBarrier:
    """bar.sync and bar.arrive: completes when the stated number of threads has come."""

    def __init__(self) -> None:
        self.threads = 0
        self.generation = 0

    def come(self, threads: int, expected: int) -> int:
        """Adds threads; returns the generation that has to be over for a sync to go on."""
        generation = self.generation
        self.threads += threads
        if self.threads > expected:
            raise SimulationError(f"{self.threads} threads at a named barrier of {expected}")
        if self.threads == expected:
            self.threads = 0
            self.generation += 1
        return generation
