"""What ptxas makes of the kernels for one row and int4 weights, compiled for sm_90a without a GPU."""

from __future__ import annotations

from collections import Counter

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed")
if not triton.__version__.startswith("3.6."):
    pytest.skip(
        f"machine code is checked on Triton 3.6, this is {triton.__version__}",
        allow_module_level=True,
    )

from triton.experimental.gluon import language as gl  # noqa: E402

from rooftile.kernels.gluon.gemm.codes_digits import scale_box  # noqa: E402
from rooftile.kernels.gluon.gemm.codes_plan import RowPlan, plan_of_row  # noqa: E402
from rooftile.kernels.gluon.gemm.codes_ring import codes_ring_kernel  # noqa: E402
from tests.support.machine_code import MachineCode, compile_for_hopper  # noqa: E402

LAYERS = [(4096, 4096), (1024, 2048), (28672, 4096), (4096, 14336), (6144, 1024), (1024, 3072)]


def compiled(plan: RowPlan, n: int, k: int) -> MachineCode:
    tiles, parts = plan.tiles(n), plan.parts(k)
    words_box = [plan.blocks * plan.warps, plan.tile, 16]
    words_layout = gl.NVMMASharedLayout.get_default_for(words_box, gl.int32)
    width = scale_box(plan.warps, plan.blocks)[0]
    scales_layout = gl.NVMMASharedLayout(4 * width, 32, 2)
    constants = {
        **{"warps_k": plan.warps, "blocks": plan.blocks, "stages": plan.stages},
        **{"tile": plan.tile, "tiles": tiles if parts > 1 or plan.once else 0},
        **{"once": parts if plan.once else 0, "room": plan.room(n)},
        **{"whole": parts * tiles <= plan.stages, "ahead": True, "activation": "none"},
        **{"has_bias": False, "has_residual": False},
    }
    types = dict.fromkeys(codes_ring_kernel.arg_names, "i32")
    types |= dict.fromkeys(("row", "out", "bias", "residual"), "*bf16")
    types["words_desc"] = f"tensordesc<i32{words_box},{words_layout!r}>"
    types["scales_desc"] = f"tensordesc<i32[{plan.tile}, {width}],{scales_layout!r}>"
    return compile_for_hopper(codes_ring_kernel, types, constants, num_warps=plan.warps)


@pytest.mark.parametrize(
    ("n", "k"),
    [x if i < 2 else pytest.param(*x, marks=pytest.mark.slow) for i, x in enumerate(LAYERS)],
)
def test_a_word_costs_few_instructions(n: int, k: int) -> None:
    """Two masks make it an operand, half a product multiplies it, and with scales, sums and loads it
    costs 7 instructions, 12 in tiles of 8 rows, of which half a product is of nothing."""
    plan = plan_of_row(n, k)
    assert plan is not None
    code = compiled(plan, n, k)
    assert code.spills() == 0
    names = [x.name for x in code.instructions]
    # Codes are on their way before the kernels ahead are waited for.
    assert names.index("UTMALDG.3D") < names.index("ACQBULK")
    whole = (
        plan.parts(k) > 1 or plan.once
    )  # activations become operands in the loop too, or without one
    steps = plan.tiles(n) if whole else 1
    words = plan.blocks * plan.tile // 2 * steps  # of a thread
    loop = None if plan.once else next(x for x in code.loops() if x.count("IMMA"))
    body = code.instructions if loop is None else loop.body
    count = Counter(x.name.split(".")[0] for x in body)
    assert count["IMMA"] == 4 * plan.blocks * (steps + whole)
    masks = sum("0xf0f0f0f" in x.text or "0x80808080" in x.text for x in body)
    assert 2 * words <= masks <= 2 * words + (plan.blocks * 4 + 8 if whole else 0)
    if not plan.once:
        assert len(body) < (12 if plan.tile == 8 else 9) * words + (250 if whole else 20)
