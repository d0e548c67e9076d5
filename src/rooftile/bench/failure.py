"""A measurement that came to nothing."""

from __future__ import annotations


class MeasurementFailed(RuntimeError):
    """Its counts or times mean nothing; the message says why, and what may be done about it."""
