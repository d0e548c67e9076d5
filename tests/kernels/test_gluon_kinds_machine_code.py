"""What ptxas makes of dual chunk and differential attention on Hopper, compiled here without a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed")
if not triton.__version__.startswith("3.6."):
    pytest.skip(
        f"machine code is checked on Triton 3.6, this is {triton.__version__}",
        allow_module_level=True,
    )

from rooftile.kernels.gluon.attention.config import ANCHORED  # noqa: E402
from rooftile.kernels.gluon.attention.config import CONFIGS as PLAIN  # noqa: E402
from rooftile.kernels.gluon.differential import config, kernel  # noqa: E402
from rooftile.kernels.gluon.dual_chunk import kernel as dual_chunk  # noqa: E402
from rooftile.kernels.gluon.paged.config import LARGE, SHORT, SMALL  # noqa: E402
from rooftile.kernels.gluon.paged.kernel import constants, paged_kernel  # noqa: E402
from tests.kernels.test_gluon_paged_machine_code import POINTERS  # noqa: E402
from tests.support.machine_code import (  # noqa: E402
    SHARED_MEMORY,
    MachineCode,
    compile_for_hopper,
    descriptor_type,
)

FLOATS = dict.fromkeys(("lse", "lse1", "lse2", "lam"), "*fp32") | {"factor": "fp32"}
INTEGERS = {"counter": "*i32", "entries": "*i32", "softcap": "fp32"}


def compiled(
    kernel: Any,
    boxes: Mapping[str, list[int]],
    values: tuple[tuple[str, Any], ...],
    most_registers: int | None = None,
) -> MachineCode:
    types = dict.fromkeys(kernel.arg_names, "i32") | FLOATS | INTEGERS
    types |= {name: descriptor_type(box) for name, box in boxes.items()}
    return compile_for_hopper(kernel, types, dict(values), most_registers=most_registers)


def check(code: MachineCode, exponentials: int, most_spills: int = 0) -> None:
    """exponentials: of a thread and block, all under a product in flight."""
    assert code.spills() <= most_spills
    assert code.shared_bytes <= SHARED_MEMORY
    loops = code.product_loops()
    assert all(loop.hazards() == [] for loop in loops)
    assert max(loop.overlapped_exponentials() for loop in loops) >= exponentials


@pytest.mark.parametrize(
    ("sizes", "shared_keys"),
    [
        (c, shared)
        for c in config.CONFIGS
        for shared in ([True] if c.shared_keys else [False, True])
    ],
    ids=str,
)
def test_differential(sizes: Any, shared_keys: bool) -> None:
    q, k = [1, 1, 64, sizes.k_dim], [1, 1, sizes.block, sizes.k_dim]
    boxes = {"q1_desc": q, "q2_desc": q, "k1_desc": k, "k2_desc": k}
    boxes |= {"v_desc": [1, 1, sizes.block, sizes.v_dim], "o_desc": [1, 1, 64, sizes.v_dim]}
    boxes |= dict.fromkeys(("k1_64_desc", "k2_64_desc", "v64_desc"), boxes["o_desc"])
    values = kernel.constants(sizes, False, True, False, True, shared_keys)
    code = compiled(kernel.differential_kernel, boxes, values)
    check(code, sizes.block // 2, most_spills=0 if sizes.k_dim < sizes.v_dim else 12)
    # The second output is in shared memory before the first warpgroup is told so.
    names = [x.name for x in code.instructions]
    written = next(i for i, name in enumerate(names) if name.startswith("STSM"))
    told = next(i for i in range(written, len(names)) if names[i].startswith("SYNCS.ARRIVE"))
    between = names[written:told]
    assert any(name.startswith("BAR.SYNC") for name in between)
    last = max(i for i, name in enumerate(between) if name.startswith("STSM"))
    assert any(name.startswith("BAR.SYNC") for name in between[last:])


@pytest.mark.parametrize("sizes", [PLAIN[128], ANCHORED[128]], ids=str)
def test_dual_chunks(sizes: Any) -> None:
    q, k = [1, 1, 1, 64, 128], [1, 1, 1, sizes.block, 128]
    names = ("intra_desc", "succ_desc", "inter_desc", "o_desc", "k64_desc", "v64_desc")
    boxes = dict.fromkeys(names, q) | {"k_desc": k, "v_desc": k}
    values = dual_chunk.constants(sizes, True, False)
    code = compiled(dual_chunk.dual_chunk_kernel, boxes, values)
    # What a second pass needs is put aside, but not in the loops.
    check(code, 64, most_spills=28 if sizes.anchored else 0)
    loops = [x for x in code.product_loops() if x.overlapped_exponentials() >= 64]
    spilled = [i for loop in loops for i in loop.body if i.name.startswith(("LDL", "STL"))]
    assert spilled == []


@pytest.mark.parametrize("sizes", [*SMALL[128], LARGE[128], SHORT[LARGE[128]]], ids=str)
def test_dual_chunks_over_pages(sizes: Any) -> None:
    """A tile of keys costs what it costs plain attention."""
    sizes = replace(sizes, anchored=False)  # as dual chunks run
    rows = sizes.few or 64
    packed, page = [1, 1, rows // 4, 4, 64], [1, 1, 1, 16, 64]
    types = dict.fromkeys(paged_kernel.arg_names, "i32") | POINTERS
    types |= {"q_desc": descriptor_type(packed), "o_desc": descriptor_type(packed)}
    types |= {"k_desc": descriptor_type(page), "v_desc": descriptor_type(page)}
    most = 128 if sizes.ctas == 2 else None
    plain, ours = (
        compile_for_hopper(
            paged_kernel,
            types,
            dict(constants(sizes, 16, 4, 4, False, False, True, False, False, rotations)),
            most_registers=most,
        )
        for rotations in (1, 3)
    )
    assert ours.spills() <= 12  # of the warp that loads, for each item; none for each tile
    loops = [min(len(x.body) for x in code.product_loops()) for code in (plain, ours)]
    assert loops[1] <= loops[0] + (10 if sizes.few else 60)
    for loop in ours.product_loops():
        assert loop.hazards() == []
        assert not any(i.name.startswith(("LDL", "STL")) for i in loop.body)
