"""Whether weights may be read before the kernels ahead have finished."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_AT_REST: ContextVar[bool] = ContextVar("weights_at_rest", default=False)


@contextmanager
def weights_at_rest() -> Iterator[None]:
    """Within it no weight that an operator gets was written by work that is still under way, as in
    an engine, so that kernels on a GPU may begin to read weights under the end of the kernel ahead.
    """
    token = _AT_REST.set(True)
    try:
        yield
    finally:
        _AT_REST.reset(token)


def are_weights_at_rest() -> bool:
    return _AT_REST.get()
