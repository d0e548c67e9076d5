"""What ptxas makes of the tutorials' kernels for sm_90a, compiled without a GPU (Triton 3.6)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed")
if not triton.__version__.startswith("3.6."):
    pytest.skip("machine code is checked on Triton 3.6", allow_module_level=True)

from docs.examples import attention, gemm  # noqa: E402

from rooftile.kernels.offline import offline  # noqa: E402
from tests.support.machine_code import (  # noqa: E402
    SHARED_MEMORY,
    MachineCode,
    compile_for_hopper,
    descriptor_type,
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize("size", [(128, 128, 64), (1000, 264, 328)])
def test_the_hosts_launch_compiles_once_for_all_sizes(
    size: tuple[int, int, int], directory: Path
) -> None:
    m, n, k = size
    with offline("sm_90a", directory) as built:
        gemm.gemm(torch.empty(m, k).bfloat16(), torch.empty(n, k).bfloat16())
    assert sum(not one.found for one in built) == (1 if m == 128 else 0)
    with offline("sm_90a", directory) as built:
        q, k_ = torch.empty(1, m, 2, 64).bfloat16(), torch.empty(1, n, 1, 64).bfloat16()
        attention.attention(q, k_, k_, causal=True)
        attention.attention(q[:, :1, :1], k_, k_, causal=True)
    assert sum(not one.found for one in built) == (1 if m == 128 else 0)


def check(code: MachineCode, products: int) -> None:
    """products: HGMMA instructions in each of the two consumers' loops."""
    assert code.spills() == 0
    assert code.shared_bytes <= SHARED_MEMORY
    assert code.count("UTMALDG")
    assert code.count("UTMASTG")
    loops = [loop for loop in code.product_loops() if loop.count("HGMMA") == products]
    assert len(loops) >= 2
    assert all(loop.hazards() == [] for loop in loops)


def test_gemm() -> None:
    types = dict.fromkeys(gemm.gemm_kernel.arg_names, "i32")
    types |= {f"{x}_desc": descriptor_type([128, 64]) for x in "ab"}
    types["c_desc"] = descriptor_type([64, 128])
    check(compile_for_hopper(gemm.gemm_kernel, types, {"stages": 4}), 4)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
def test_attention(dim: int, causal: bool) -> None:
    types = dict.fromkeys(attention.attention_kernel.arg_names, "i32")
    for x, rows in (("q", 64), ("k", 128), ("v", 128), ("o", 64)):
        types[f"{x}_desc"] = descriptor_type([1, 1, rows, dim])
    types |= {"lse": "*fp32", "factor": "fp32"}
    constants = {"dim": dim, "stages": 2, "causal": causal}
    # QK has dim / 16 of them, PV 128 / 16.
    check(compile_for_hopper(attention.attention_kernel, types, constants), dim // 16 + 8)
