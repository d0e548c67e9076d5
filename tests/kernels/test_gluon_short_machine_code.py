"""What ptxas makes of the Hopper attention kernel for few keys."""

from __future__ import annotations

from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed")
if not triton.__version__.startswith("3.6."):
    pytest.skip(
        f"machine code is checked on Triton 3.6, this is {triton.__version__}",
        allow_module_level=True,
    )

from triton.experimental.gluon import language as gl  # noqa: E402

from rooftile.kernels.gluon.attention.config import SHORT  # noqa: E402
from rooftile.kernels.gluon.attention.short.forward import constants  # noqa: E402
from rooftile.kernels.gluon.attention.short.kernel import short_attention_kernel  # noqa: E402
from tests.support.machine_code import (  # noqa: E402
    SHARED_MEMORY,
    compile_for_hopper,
    descriptor_type,
)


@pytest.mark.parametrize("dtype", [gl.bfloat16, gl.float16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("short", SHORT, ids=str)
def test_few_keys(short: Any, causal: bool, dtype: Any) -> None:
    types = dict.fromkeys(short_attention_kernel.arg_names, "i32")
    for x, rows in (("q", short.rows), ("k", short.keys), ("v", short.keys), ("o", short.rows)):
        types[f"{x}_desc"] = descriptor_type([1, 1, rows, short.dim], dtype)
    types |= {"lse": "*fp32", "factor": "fp32"}
    code = compile_for_hopper(
        *(short_attention_kernel, types, dict(constants(short, causal))),
        most_registers=short.most_registers,
    )
    # All CTAs that are meant to share an SM do: see test_gluon_machine_code.py.
    assert code.shared_bytes <= (SHARED_MEMORY + 1024) // short.ctas - 1024
    assert code.spills() == 0
    assert code.count("UTMALDG") == 6  # of the first tile, and of each that follows
    assert code.count("UTMASTG") == 1
    assert code.loops()
    for loop in code.loops():
        assert loop.hazards() == []
        assert loop.count("WARPGROUP.DEPBAR") <= 2  # each product is in flight as a whole
