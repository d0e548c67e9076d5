"""What ptxas makes of the kernels for one row and int4 weights, compiled for sm_90a without a GPU."""

from __future__ import annotations

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed")
if not triton.__version__.startswith("3.6."):
    pytest.skip(
        f"machine code is checked on Triton 3.6, this is {triton.__version__}",
        allow_module_level=True,
    )

from triton.experimental.gluon import language as gl  # noqa: E402

from rooftile.kernels.gluon.gemm.codes_plan import RowPlan, plan_of_row  # noqa: E402
from rooftile.kernels.gluon.gemm.codes_ring import codes_ring_kernel  # noqa: E402
from tests.support.machine_code import MachineCode, compile_for_hopper  # noqa: E402

LAYERS = [(6144, 4096), (4096, 14336), (4096, 4096), (4096, 1024), (1024, 3072)]


def compiled(plan: RowPlan, k: int) -> MachineCode:
    steps = -(-k // plan.step)
    stages = min(plan.stages, steps)
    box = [plan.blocks * plan.warps, 16, 16]
    layout = gl.NVMMASharedLayout.get_default_for(box, gl.int32)
    constants = {
        **{"warps_k": plan.warps, "blocks": plan.blocks, "stages": stages, "ahead": True},
        **{"even": k % plan.step == 0, "whole": steps <= stages, "activation": "none"},
        **{"has_bias": False, "has_residual": False},
    }
    types = dict.fromkeys(codes_ring_kernel.arg_names, "i32")
    types |= dict.fromkeys(("row", "out", "bias", "residual", "scales"), "*bf16")
    types["words_desc"] = f"tensordesc<i32{box},{layout!r}>"
    return compile_for_hopper(codes_ring_kernel, types, constants, num_warps=plan.warps)


@pytest.mark.parametrize(
    ("n", "k"),
    [x if i < 2 else pytest.param(*x, marks=pytest.mark.slow) for i, x in enumerate(LAYERS)],
)
def test_a_word_costs_few_instructions(n: int, k: int) -> None:
    """Four masks, three shifts, four subtractions and a product for eight codes, and no moves of
    operands: 19 instructions with all that a step does besides."""
    plan = plan_of_row(n, k)
    assert plan is not None
    code = compiled(plan, k)
    assert code.spills() == 0
    words = plan.blocks * 8  # of a thread and step
    names = [x.name for x in code.instructions]
    # Codes are on their way before the kernels ahead are waited for.
    assert names.index("UTMALDG.3D") < names.index("ACQBULK")
    loop = next((x for x in code.loops() if x.count("HMMA")), None)  # none where a step is all
    body = code if loop is None else loop
    assert body.count("HMMA") == words
    assert body.count("HADD2") == 4 * words
    assert body.count("HMUL2") == 0
    if loop is not None:
        assert len(loop.body) < 21 * words
