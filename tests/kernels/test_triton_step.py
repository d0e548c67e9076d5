"""The Triton kernels of an engine step in Triton's interpreter (see test_triton_attention.py)."""

from __future__ import annotations

import os

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1, in a process of its own", allow_module_level=True)
pytest.importorskip("triton", reason="Triton is not installed")

from tests.engine.packed import check_prepared


def test_the_packed_step() -> None:
    check_prepared("triton")
