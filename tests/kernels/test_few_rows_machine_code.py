"""What ptxas makes of the kernels for few rows, compiled here for sm_90a without a GPU."""

from __future__ import annotations

from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed")
if not triton.__version__.startswith("3.6."):
    pytest.skip(
        f"machine code is checked on Triton 3.6, this is {triton.__version__}",
        allow_module_level=True,
    )

from rooftile.kernels.gluon.gemm.few_rows import few_rows_kernel  # noqa: E402
from tests.support.machine_code import (  # noqa: E402
    MachineCode,
    compile_for_hopper,
    descriptor_type,
)

HALF = 113 * 1024  # of a multiprocessor's shared memory: two CTAs side by side


def few_rows(**more: Any) -> MachineCode:
    fixed: dict[str, Any] = {
        "tile": 64,
        "rows": 8,
        "pieces": 2,
        "stages": 4,
        "warps": 4,
        "ahead": True,
        "split": True,
        "activation": "none",
        "gated": False,
        "has_bias": False,
        "has_residual": False,
        **more,
    }
    types = dict.fromkeys(few_rows_kernel.arg_names, "i32")
    box_rows = fixed["tile"] // 2 if fixed["gated"] else fixed["tile"]
    types |= {
        "weight_desc": descriptor_type([box_rows, 64]),
        "x_desc": descriptor_type([fixed["rows"], 64]),
        **dict.fromkeys(("out", "bias", "residual"), "*bf16"),
        "parts": "*fp32",
        "arrivals": "*i32",
    }
    return compile_for_hopper(few_rows_kernel, types, fixed, num_warps=fixed["warps"])


@pytest.mark.parametrize(
    "features",
    [
        {},
        {"rows": 64, "warps": 8, "tile": 256, "stages": 2, "split": False},
        pytest.param({"rows": 64, "stages": 6}, marks=pytest.mark.slow),
        pytest.param({"rows": 16, "split": False, "has_bias": True}, marks=pytest.mark.slow),
        pytest.param({"gated": True, "activation": "silu", "tile": 128}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_few_rows_stream_and_multiply(features: dict[str, Any]) -> None:
    code = few_rows(**features)
    fixed = {"pieces": 2, "tile": 64, "warps": 4, **features}
    assert code.spills() == 0
    assert len(code.instructions) < 1100  # a launch waits for its code
    names = [x.name for x in code.instructions]
    # Weights are on their way before the kernels ahead are waited for.
    assert names.index("UTMALDG.2D") < names.index("ACQBULK")
    # The other one is the way back of a wait that did not end at once.
    loop = min(code.product_loops(), key=lambda found: len(found.body))
    assert loop.count("HGMMA") == fixed["pieces"] * 4 * fixed["tile"] // (16 * fixed["warps"])
    assert loop.hazards() == []
    assert loop.count("UTMALDG") == fixed["pieces"] * (3 if features.get("gated") else 2)
    assert bool(code.count("ATOMG")) == features.get("split", True)
    if not features:
        assert code.shared_bytes < HALF
