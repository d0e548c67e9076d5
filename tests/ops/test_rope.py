"""rotary_embedding against a float64 oracle: both pairings, partial rotation, gradients, refusals."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rooftile.ops.append import append_kv
from rooftile.ops.dual_chunk_rotary import dual_chunk_rotary_embedding
from rooftile.ops.rope import ROTARY_EMBEDDING, rotary_embedding
from rooftile.ops.rotary_table import RotaryConfig, rotary_table
from tests.ops.accuracy import assert_rows_close, dtype_for, kernels_to_test, opcheck

KERNELS = kernels_to_test(ROTARY_EMBEDDING)


def oracle(x: Tensor, positions: Tensor, cos_sin: Tensor, interleaved: bool) -> Tensor:
    """One pair at a time."""
    out, half = x.double().clone(), cos_sin.shape[2]
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        cos, sin = cos_sin[positions.long(), :, i].double()[:, :, None].unbind(1)
        out[..., a] = x[..., a].double() * cos - x[..., b].double() * sin
        out[..., b] = x[..., b].double() * cos + x[..., a].double() * sin
    return out


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("interleaved", [False, True])
@given(
    tokens=st.integers(0, 9),
    heads=st.integers(0, 5),
    half=st.integers(1, 20),
    rest=st.sampled_from([0, 0, 1, 6]),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
    index=st.sampled_from([torch.int32, torch.int64]),
    seed=st.integers(0, 2**32),
)
def test_equals_the_oracle(
    kernel: str,
    interleaved: bool,
    tokens: int,
    heads: int,
    half: int,
    rest: int,
    dtype: torch.dtype,
    index: torch.dtype,
    seed: int,
) -> None:
    dtype = dtype_for(kernel, dtype)
    generator = torch.Generator().manual_seed(seed)
    head_dim = 2 * half + rest
    # The heads of q inside a fused projection, as the decoder has them; the rest is NaN.
    fused = torch.full((tokens, heads + 2, head_dim), torch.nan, dtype=dtype)
    fused[:, :heads] = torch.randn(tokens, heads, head_dim, generator=generator)
    x = fused[:, :heads]
    positions = torch.randint(0, 30, (tokens,), generator=generator, dtype=index)
    table = rotary_table(RotaryConfig(2 * half), 30)
    out = rotary_embedding(x, positions, table, interleaved=interleaved, kernel=kernel)
    assert out.dtype == dtype
    assert out.is_contiguous()
    assert torch.equal(out[..., 2 * half :], x[..., 2 * half :])
    assert_rows_close(out, oracle(x, positions, table, interleaved), dtype)


def test_pairs_as_transformers_does() -> None:
    apply_rotary_pos_emb = pytest.importorskip(
        "transformers.models.llama.modeling_llama"
    ).apply_rotary_pos_emb
    table = rotary_table(RotaryConfig(16), 40)
    q, positions = torch.randn(7, 3, 16), torch.randint(0, 40, (7,))
    cos, sin = table[positions].repeat(1, 1, 2).unbind(1)
    expected, _ = apply_rotary_pos_emb(q, q, cos, sin, unsqueeze_dim=1)
    torch.testing.assert_close(rotary_embedding(q, positions, table), expected)


@pytest.mark.parametrize("kernel", ["torch", "reference"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_gradients(kernel: str, interleaved: bool) -> None:
    x = torch.randn(3, 2, 7, dtype=torch.float64, requires_grad=True)
    positions = torch.tensor([0, 5, 3])
    # A factor on the table, as YaRN has it: the backward is the transpose, not the inverse.
    table = 1.3 * rotary_table(RotaryConfig(6), 6)

    def call(x: Tensor) -> Tensor:
        return rotary_embedding(x, positions, table, interleaved=interleaved, kernel=kernel)

    assert torch.autograd.gradcheck(call, (x,))
    assert torch.autograd.gradgradcheck(call, (x,))


def test_opcheck_and_compile() -> None:
    x = torch.randn(3, 2, 8, requires_grad=True)
    positions, table = torch.tensor([0, 5, 3]), rotary_table(RotaryConfig(6), 6)
    for interleaved in (False, True):
        opcheck(ROTARY_EMBEDDING, x, positions, table, interleaved, False)
    compiled = torch.compile(rotary_embedding, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, positions, table), rotary_embedding(x, positions, table))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_table_that_was_converted_with_its_module_is_refused(dtype: torch.dtype) -> None:
    x, at = torch.randn(3, 2, 8).to(dtype), torch.tensor([0, 5, 3])
    module = torch.nn.Module()
    module.register_buffer("table", rotary_table(RotaryConfig(8), 6))
    table = module.to(dtype).get_buffer("table")
    pages = torch.zeros(1, 2, 4, 8, dtype=dtype), torch.zeros(1, 2, 4, 8, dtype=dtype)
    for call in (
        lambda: rotary_embedding(x, at, table),
        lambda: append_kv(x, x, *pages, torch.arange(3), positions=at, cos_sin=table),
        lambda: dual_chunk_rotary_embedding(x, at, table, chunk_size=5, local_size=2),
    ):
        with pytest.raises(ValueError, match=f"cos_sin has dtype {dtype}; keep it torch.float32"):
            call()


def test_refusals_name_the_value_and_the_remedy() -> None:
    x, positions = torch.randn(3, 2, 8), torch.tensor([0, 5, 3])
    table = rotary_table(RotaryConfig(8), 6)
    with pytest.raises(ValueError, match=r"x has shape \[3, 8\]; expected \[tokens, heads"):
        rotary_embedding(x[:, 0], positions, table)
    with pytest.raises(ValueError, match=r"positions has shape \[2\]; expected \[tokens\] = \[3\]"):
        rotary_embedding(x, positions[:2], table)
    with pytest.raises(ValueError, match="positions has dtype torch.float32"):
        rotary_embedding(x, positions.float(), table)
    with pytest.raises(ValueError, match=r"cos_sin has shape \[6, 2, 4\]; .* 0 < rotary_dim <= 6"):
        rotary_embedding(x[..., :6], positions, table)
    with pytest.raises(ValueError, match="from 0 to 5, but cos_sin has the positions 0 to 4"):
        rotary_embedding(x, positions, table[:5])
    with pytest.raises(ValueError, match="from -1 to 3"):
        rotary_embedding(x, torch.tensor([0, -1, 3]), table)
    with pytest.raises(ValueError, match="cos_sin is on meta but x is on cpu"):
        rotary_embedding(x, positions, table.to("meta"))
    with pytest.raises(ValueError, match="kernel='gluon' does not exist"):
        rotary_embedding(x, positions, table, kernel="gluon")
