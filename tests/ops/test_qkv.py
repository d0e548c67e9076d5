"""norm_rotate_append against the operators that it stands for, one after the other."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rooftile.ops.append import append_kv
from rooftile.ops.dual_chunk_rotary import dual_chunk_rotary_embedding
from rooftile.ops.norm import rms_norm
from rooftile.ops.qkv import NORM_ROTATE_APPEND
from rooftile.ops.rope import rotary_embedding
from rooftile.ops.rotary_table import RotaryConfig, rotary_table
from tests.ops.accuracy import assert_rows_close, dtype_for, kernels_to_test, opcheck

KERNELS = kernels_to_test(NORM_ROTATE_APPEND)
DEVICE = "cpu"


def check(
    kernel: str, tokens: int, heads: tuple[int, int], dim: int, rotary: int, norm: bool,
    offset: float, dtype: torch.dtype, seed: int, device: str = DEVICE, slot_heads: int = 1,
    chunks: tuple[int, int, int] = (0, 0, 0), whole: bool = False,
) -> None:  # fmt: skip
    """slot_heads: heads of k and v that lie side by side in a slot."""
    g = torch.Generator().manual_seed(seed)
    q_heads, kv_heads = heads
    width = (q_heads + 2 * kv_heads) * dim

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g).to(dtype).to(device)

    qkv = random(tokens, width + 8)[:, :width]
    q_weight, k_weight = (random(dim), random(dim)) if norm else (None, None)
    positions = torch.randint(0, 40, (tokens,), generator=g).to(device)
    table = rotary_table(RotaryConfig(rotary), 40).to(device) if rotary else None
    in_slot = (kv_heads // slot_heads, 4, slot_heads * dim)
    pages = torch.full((tokens + 2, 2, *in_slot), torch.nan, dtype=dtype, device=device)
    k_pages, v_pages = pages[:, 0], pages[:, 1]
    slots = torch.randperm(4 * (tokens + 2), generator=g)[:tokens]
    slots = torch.where(torch.rand(tokens, generator=g) < 0.3, -1, slots).to(device)
    lengths = positions + 7 if whole else None
    q = NORM_ROTATE_APPEND.handle(
        qkv, q_weight, k_weight, 1e-5, offset, positions, table, k_pages, v_pages, slots,
        q_heads, kv_heads, *chunks, lengths, kernel,
    )  # fmt: skip

    parts = (
        qkv.double()
        .unflatten(1, (q_heads + 2 * kv_heads, dim))
        .split((q_heads, kv_heads, kv_heads), 1)
    )
    turned = []
    for x, weight in zip(parts, (q_weight, k_weight), strict=False):
        if weight is not None:
            # Rounded in between, as the operators do.
            x = rms_norm(x, weight.double(), 1e-5, weight_offset=offset).to(dtype).double()
        at = positions if not chunks[0] or not turned else positions % (chunks[0] - chunks[1])
        if chunks[0] and not turned:
            options = {"chunk_size": chunks[0], "local_size": chunks[1], "lengths": lengths}
            options["original_max_position"] = chunks[2] or None
            assert table is not None
            turned.append(torch.stack(dual_chunk_rotary_embedding(x, at, table, **options)))
        else:
            turned.append(x if table is None else rotary_embedding(x, at, table))
    assert q.shape == (*((3,) if chunks[0] else ()), tokens, q_heads, dim)
    # Rounded twice where there are norms: half a rounding may turn.
    scale = 2.0 if norm else 1.0
    assert_rows_close(q, turned[0], dtype, scale)
    expected = torch.full_like(pages, torch.nan, dtype=torch.float64)
    k, v = (x.reshape(tokens, in_slot[0], in_slot[2]) for x in (turned[1], parts[2]))
    append_kv(k, v, expected[:, 0], expected[:, 1], slots, kernel="reference")
    assert torch.equal(k_pages.isnan(), expected[:, 0].isnan())
    assert torch.equal(v_pages.double().nan_to_num(), expected[:, 1].nan_to_num())
    assert_rows_close(k_pages.nan_to_num(), expected[:, 0].nan_to_num(), dtype, scale)


@pytest.mark.parametrize("kernel", KERNELS)
@settings(max_examples=25)
@given(
    tokens=st.integers(0, 6),
    heads=st.sampled_from([(1, 1), (4, 2), (9, 3), (8, 8)]),
    dims=st.sampled_from([(8, 8), (16, 0), (24, 8), (20, 20), (64, 64)]),
    norm=st.booleans(),
    offset=st.sampled_from([0.0, 1.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    chunks=st.sampled_from([(0, 0, 0), (0, 0, 0), (13, 4, 0), (24, 8, 10)]),
    whole=st.booleans(),
    slot_heads=st.sampled_from([1, 2]),
    seed=st.integers(0, 2**31),
)
def test_equals_the_operators_in_turn(
    kernel: str, tokens: int, heads: tuple[int, int], dims: tuple[int, int], norm: bool,
    offset: float, dtype: torch.dtype, chunks: tuple[int, int, int], whole: bool, slot_heads: int,
    seed: int,
) -> None:  # fmt: skip
    slot_heads = slot_heads if heads[1] % 2 == 0 else 1
    chunks = chunks if dims[1] else (0, 0, 0)
    dtype = dtype_for(kernel, dtype)
    check(
        *(kernel, tokens, heads, *dims, norm, offset, dtype, seed, DEVICE),
        *(slot_heads, chunks, whole),
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dims", [(128, 128), (64, 64), (96, 48), (256, 0)], ids=str)
@pytest.mark.parametrize("heads", [(32, 8), (9, 3), (5, 1)], ids=str)
def test_on_a_gpu(dtype: torch.dtype, dims: tuple[int, int], heads: tuple[int, int]) -> None:
    for tokens, norm in ((1, True), (70, True), (300, False)):
        check("triton", tokens, heads, *dims, norm, 0.0, dtype, tokens, "cuda")
        in_pairs = 2 if heads[1] % 2 == 0 else 1
        check("triton", tokens, heads, *dims, norm, 0.0, dtype, tokens, "cuda", in_pairs)
        if dims[1]:
            more = (1, (24, 8, 10), tokens == 70)
            check("triton", tokens, heads, *dims, norm, 0.0, dtype, tokens, "cuda", *more)


def test_opcheck() -> None:
    pages = torch.zeros(3, 2, 2, 4, 8)
    arguments = (
        *(torch.randn(5, 6 * 8), torch.ones(8), torch.ones(8), 1e-5, 0.0, torch.arange(5)),
        *(rotary_table(RotaryConfig(8), 9), pages[:, 0], pages[:, 1], torch.arange(5), 2, 2),
    )
    for chunks in ((0, 0, 0), (6, 2, 4)):
        opcheck(
            *(NORM_ROTATE_APPEND, *arguments, *chunks, None),
            test_utils=("test_schema", "test_faketensor"),
        )
