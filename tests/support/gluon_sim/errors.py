"""What a simulated kernel can do wrong."""

from __future__ import annotations


class SimulationError(RuntimeError):
    """The kernel did something that a GPU would answer with wrong results or a fault."""


class Deadlock(SimulationError):
    """No role of any resident CTA can go on."""
