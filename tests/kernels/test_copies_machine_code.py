"""What ptxas makes of the copies of operands, compiled here for sm_90a without a GPU."""

from __future__ import annotations

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed")
if not triton.__version__.startswith("3.6."):
    pytest.skip(
        f"machine code is checked on Triton 3.6, this is {triton.__version__}",
        allow_module_level=True,
    )

from rooftile.kernels.gluon.gemm.pad import copy_kernel  # noqa: E402
from tests.support.machine_code import compile_for_hopper  # noqa: E402


@pytest.mark.parametrize("columns", [4, 64])
def test_whole_vectors_are_moved(columns: int) -> None:
    """Of each of two matrices a thread reads two vectors and those that follow them, and writes two."""
    types = dict.fromkeys(copy_kernel.arg_names, "i32")
    types |= dict.fromkeys(("x", "copy", "other", "other_copy"), "*i16")
    blocks = {"block_rows": 256 // columns, "block_columns": columns}
    constants = blocks | {f"other_{name}": value for name, value in blocks.items()}
    code = compile_for_hopper(copy_kernel, types, constants | {"warps": 4})
    assert not code.spills()
    assert code.count("LDG.E.128") == code.count("LDG") == 2 * 2 * 2
    assert code.count("STG.E.128") == code.count("STG") == 2 * 2
