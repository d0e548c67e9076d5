"""What ptxas makes of the Hopper matrix product, compiled here for sm_90a without a GPU.

Needs Triton 3.6 (the version whose machine code is checked) and takes a few seconds a variant.
"""

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

from rooftile.kernels.gluon.gemm.config import (  # noqa: E402
    CONFIGS,
    LARGE,
    PAIRS,
    QUADS,
    SPLIT,
    Config,
    constants,
    wide,
)
from rooftile.kernels.gluon.gemm.kernel import matmul_kernel  # noqa: E402
from rooftile.planning.stream_k import Tiling  # noqa: E402
from rooftile.planning.stream_k_choice import WIDEST_JOINED  # noqa: E402
from tests.support.machine_code import (  # noqa: E402
    SHARED_MEMORY,
    MachineCode,
    compile_for_hopper,
    descriptor_type,
)

NAMES = {f"{c.block_m}x{c.block_n}": c for c in CONFIGS}


def compiled(config: Config, dtype: Any = gl.bfloat16, out: Any = None, **more: Any) -> MachineCode:
    itemsize = 1 if dtype == gl.float8e4nv else 2
    out = out or gl.bfloat16
    options: dict[str, Any] = {
        "a_rows": config.block_m,
        "a_by_rows": True,
        "b_by_rows": False,
        "activation": "none",
        "has_bias": False,
        "has_residual": False,
        "has_scales": False,
        "out_unit": 0,
        "ahead": False,
        "streamed": True,
        "apart": False,
        **more,
    }
    out_itemsize = 4 if out == gl.float32 else 2
    fixed = dict(constants(config, itemsize=itemsize, out_itemsize=out_itemsize, **options))
    steps = config.block_k(itemsize)
    columns = config.b_columns(fixed["gated"], options["b_by_rows"])
    a_rows = options["a_rows"] // config.across
    a_box = [a_rows, steps] if options["a_by_rows"] else [steps, config.block_m]
    b_box = [steps, columns] if options["b_by_rows"] else [columns, steps]
    out_box = [config.stored_rows, config.chunk(fixed["gated"], out_itemsize)]
    out_box = out_box[::-1] if fixed["transposed"] else out_box
    types = dict.fromkeys(matmul_kernel.arg_names, "i32")
    types |= {
        "a_desc": descriptor_type(a_box, dtype),
        "b_desc": descriptor_type(b_box, dtype),
        "out_desc": descriptor_type(out_box, out),
        "out": "*bf16",
        "bias": "*bf16",
        "residual": "*bf16",
        "scale_a": "*fp32",
        "scale_b": "*fp32",
        "parts": "*fp32",
        "flags": "*i32",
    }
    return compile_for_hopper(matmul_kernel, types, fixed)


@pytest.mark.parametrize(
    ("name", "features"),
    [
        ("128x256", {}),
        ("128x128", {}),
        ("64x64", {"a_rows": 16}),
        ("64x64", {"streamed": False}),
        *(
            pytest.param(name, features, marks=pytest.mark.slow)
            for name, features in (
                ("256x128", {}),
                ("64x256", {}),
                ("64x128", {}),
                ("64x32", {}),
                ("128x256", {"a_by_rows": False, "b_by_rows": True}),
                ("128x256", {"out": gl.float32}),
                ("128x256", {"dtype": gl.float16, "out": gl.float16}),
                ("128x256", {"activation": "silu_and_mul", "has_bias": True}),
                ("64x128", {"activation": "silu_and_mul", "has_residual": True}),
                ("128x256", {"out_unit": 1}),
                ("64x64", {"ahead": True}),
                ("128x256", {"streamed": False}),
                ("64x128", {"streamed": False, "apart": True, "out": gl.float32}),
            )
        ),
    ],
)
def test_the_loop_does_nothing_but_multiply(name: str, features: dict[str, Any]) -> None:
    config = NAMES[name]
    code = compiled(config, **features)
    assert code.spills() == 0
    assert code.shared_bytes <= SHARED_MEMORY
    assert code.count("UTMALDG") >= 2
    assert bool(code.count("UTMASTG")) == ("out_unit" not in features)
    # Four products of 16 along K a step, twice that where a warpgroup has 128 rows.
    products = 4 * config.rows // 64
    loops = [loop for loop in code.product_loops() if len(loop.body) <= 72 + products * 6]
    # One for each consumer warpgroup, and one more while a part is on its way.
    streamed = features.get("streamed", True)
    assert len(loops) == (4 if streamed else 2)
    if not streamed:  # a launch waits for its code, too
        assert len(code.instructions) < 1000
    for loop in loops:
        assert loop.count("HGMMA") == products
        assert streamed or len(loop.body) <= 36 + products * 5
        assert loop.hazards() == []
        assert loop.count("WARPGROUP.DEPBAR") == 1


def _name(config: Config) -> str:
    together = f"{config.sharers}x{config.across}"
    return f"{config.block_m}x{config.block_n}/{together}k{config.split}"


@pytest.mark.parametrize(
    ("config", "features"),
    [
        (PAIRS[0], {}),
        (SPLIT[-2], {"streamed": False}),
        *(
            pytest.param(config, features, marks=pytest.mark.slow)
            for configs, variants in (
                (PAIRS + QUADS, ({}, {"streamed": False}, {"apart": True, "out": gl.float32})),
                (SPLIT, ({"streamed": False},)),
            )
            for config in configs
            for features in variants
        ),
    ],
    ids=lambda x: _name(x) if isinstance(x, Config) else "-".join(x) or "streamed",
)
def test_clusters(config: Config, features: dict[str, Any]) -> None:
    """CTAs that load columns together, and those that share a tile's steps along K."""
    features = {"streamed": not features.get("apart", False), **features}
    code = compiled(config, **features)
    assert code.spills() == 0
    assert code.shared_bytes + 1024 <= SHARED_MEMORY  # and the barriers'
    assert code.count("UTMALDG.2D.MULTICAST") == (config.sharers > 1)
    assert code.count("UTMALDG") == 2
    products = 4 * config.rows // 64
    loops = [loop for loop in code.product_loops() if len(loop.body) <= 54 + products * 6]
    assert len(loops) == (4 if features["streamed"] else 2)
    for loop in loops:
        assert loop.hazards() == []
        assert loop.count("BAR") == 0
    # The producer's addresses are Triton's: the place of the smaller operand appears in the loads of
    # both consumers, and in the producer's.
    assert code.ptx.count(f", {max(config.places)};") >= 3
    sends = code.ptx.count("st.async.shared::cluster")
    assert sends == (2 * config.rows * config.columns(False) * config.split // 512) * (
        config.split > 1
    )


WIDE = [
    wide(Tiling(rows * sharers, columns * across, 64, sharers * across, 1, across))
    for rows, columns, sharers, across in (
        *((128, 152, 1, 1), (128, 144, 2, 1), (128, 136, 1, 2), (128, 80, 2, 2), (128, 72, 1, 4)),
        *((64, 48, 2, 4), (64, 160, 4, 1), (64, 64, 4, 2), (128, 240, 1, 1), (128, 256, 2, 2)),
    )
]


@pytest.mark.parametrize(
    ("config", "features"),
    [
        (WIDE[1], {"streamed": False}),
        (WIDE[3], {"streamed": False, "transposed": True}),
        *(
            pytest.param(config, features, marks=pytest.mark.slow)
            for config in (*WIDE, WIDE[0].passing_on, WIDE[1].passing_on)
            for features in (
                {},
                {"streamed": False},
                {"streamed": False, "transposed": True, "has_bias": True},
                {"streamed": False, "apart": True, "out": gl.float32},
            )
        ),
    ],
    ids=lambda x: f"{_name(x)}{'+' * x.passing}" if isinstance(x, Config) else "-".join(x),
)
def test_tiles_of_any_width(config: Config, features: dict[str, Any]) -> None:
    """One instruction multiplies all columns of a warpgroup, and results are stored by matrices."""
    code = compiled(config, **features)
    streamed = features.get("streamed", True)
    # What is spilled is the grid's size, read once a tile; such plans are not made (WIDEST_JOINED).
    assert code.spills() == 0 or (streamed and config.block_n > WIDEST_JOINED)
    assert code.shared_bytes + 1024 <= SHARED_MEMORY
    assert code.count("UTMALDG") == 2
    together = (config.sharers > 1) + (config.across > 1)
    assert code.count("UTMALDG.2D.MULTICAST") == together
    columns = config.block_n // (1 if config.split_rows or config.in_turn else 2)
    loops = [loop for loop in code.product_loops() if len(loop.body) <= 90]
    assert len(loops) == (4 if streamed else 2)
    for loop in loops:
        assert loop.count(f"HGMMA.64x{columns}x16") == loop.count("HGMMA") == 4
        assert loop.hazards() == []
        assert loop.count("BAR") == 0
        (wait,) = [x for x in loop.body if x.name.startswith("WARPGROUP.DEPBAR")]
        assert wait.text.endswith("0x0" if config.in_turn else "0x1")
    if "out" not in features:
        assert code.count("STSM") > 0
        assert code.count("STSM.16.MT88") == (code.count("STSM") if "transposed" in features else 0)
    # Where the producer believes that the operands lie: Triton stores there, where nobody comes by.
    if config.is_odd:
        assert f"+{max(config.places)}], {{0, 0, 0, 0}}" in code.ptx


def test_parts_are_moved_eight_bytes_at_a_time() -> None:
    code = compiled(LARGE)
    wide = code.count("LDG.E.64"), code.count("STG.E.64")
    assert wide == (128, 128)  # 64 for each warpgroup: its whole part
    # Published at once where nothing else is left to do, or some steps later.
    assert code.count("ATOMG.E.EXCH") == 4


@pytest.mark.slow
def test_fp8() -> None:
    code = compiled(LARGE, dtype=gl.float8e4nv, has_scales=True)
    assert code.spills() == 0
    assert code.count("QGMMA")
