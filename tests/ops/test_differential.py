"""Differential attention: against two softmaxes written out row by row in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rooftile.ops.differential import (
    DIFFERENTIAL,
    DIFFERENTIAL_BACKWARD,
    DIFFERENTIAL_VARLEN,
    DIFFERENTIAL_VARLEN_BACKWARD,
    PAGED_DIFFERENTIAL,
    differential_attention,
    differential_attention_varlen,
    paged_differential_attention,
)
from rooftile.ops.operator import GPU_FAMILIES, Operator
from tests.ops import attention_oracle as oracle
from tests.ops.accuracy import dtype_for, opcheck
from tests.ops.test_paged import fill

LAMBDAS = st.sampled_from(["number", "pairs", "tokens"])
Window = tuple[int | None, int | None] | None


def on_cpu(operator: Operator) -> list[str]:
    """GPU kernels have tests of their own, in tests/kernels."""
    return [family for family in operator.families if family not in GPU_FAMILIES]


def draw_lam(g: torch.Generator, kind: str, *shape: int) -> Tensor | float:
    """shape: of queries [..., pairs]."""
    if kind == "number":
        return 0.7
    return torch.rand(shape[-1:] if kind == "pairs" else shape, generator=g)


def attend(
    q1: Tensor,  # [q_len, pairs, k_dim]
    k1: Tensor,  # [kv_len, kv_pairs, k_dim]
    q2: Tensor,
    k2: Tensor | None,
    v: Tensor,  # [kv_len, kv_pairs, v_dim]
    lam: Tensor | float,
    causal: bool = False,
    window: Window = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    options = {"causal": causal, "window": window, "softmax_scale": scale}
    out1, lse1 = oracle.attend(q1, k1, v, **options)
    out2, lse2 = oracle.attend(q2, k1 if k2 is None else k2, v, **options)
    wide = torch.as_tensor(lam, dtype=torch.float64)[..., None]
    return out1 - wide * out2, lse1, lse2


def assert_close(
    actual: tuple[Tensor, Tensor, Tensor],
    expected: tuple[Tensor, Tensor, Tensor],
    dtype: torch.dtype,
) -> None:
    out, lse1, lse2 = actual
    unit = torch.finfo(dtype).eps * (2 if dtype.itemsize == 2 else 16)
    # Each of the two outputs has the errors of an attention's.
    error = (out.double() - expected[0]).abs()
    allowed = 2 * unit * (1 + expected[0].abs().amax(-1, keepdim=True))
    assert out.dtype == dtype
    assert bool((error <= allowed).all()), f"{error.max()} above {allowed.min()}"
    oracle.assert_lse_close(lse1, expected[1], dtype)
    oracle.assert_lse_close(lse2, expected[2], dtype)


@pytest.mark.parametrize("kernel", on_cpu(DIFFERENTIAL))
@given(
    batch=st.integers(0, 2),
    q_len=st.integers(0, 9),
    kv_len=st.integers(0, 20),
    heads=oracle.HEADS,
    dims=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    shared=st.booleans(),
    lam_kind=LAMBDAS,
    causal=st.booleans(),
    window=oracle.WINDOWS,
    scale=st.sampled_from([None, 0.3, -0.2, 0.0]),
    dtype=oracle.DTYPES,
    strided=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_dense(
    kernel: str,
    batch: int,
    q_len: int,
    kv_len: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    shared: bool,
    lam_kind: str,
    causal: bool,
    window: Window,
    scale: float | None,
    dtype: torch.dtype,
    strided: bool,
    seed: int,
) -> None:
    if kernel == "torch":
        dims = (dims[0], dims[0] if shared else 2 * dims[0])
    g = torch.Generator().manual_seed(seed)
    q1, q2 = (
        oracle.draw(g, dtype, batch, q_len, heads[0], dims[0], strided=strided) for _ in range(2)
    )
    k1, k2 = (
        oracle.draw(g, dtype, batch, kv_len, heads[1], dims[0], strided=strided) for _ in range(2)
    )
    v = oracle.draw(g, dtype, batch, kv_len, heads[1], dims[1], strided=strided)
    lam = draw_lam(g, lam_kind, batch, q_len, heads[0])
    second = None if shared else k2
    got = differential_attention(
        *(q1, k1, q2, second, v, lam),
        causal=causal,
        window=window,
        softmax_scale=scale,
        return_lse=True,
        kernel=kernel,
    )
    for b in range(batch):
        expected = attend(
            *(q1[b], k1[b], q2[b], None if shared else k2[b], v[b]),
            lam[b] if lam_kind == "tokens" else lam,
            causal,
            window,
            scale,
        )
        assert_close((got[0][b], got[1][b], got[2][b]), expected, dtype)


@pytest.mark.parametrize("kernel", on_cpu(DIFFERENTIAL_VARLEN))
@given(
    lengths=st.lists(
        st.tuples(st.sampled_from([0, 1, 2, 7]), st.sampled_from([0, 1, 8, 20])), max_size=4
    ),
    padding=st.integers(0, 2),
    heads=oracle.HEADS,
    shared=st.booleans(),
    lam_kind=LAMBDAS,
    causal=st.booleans(),
    dtype=oracle.DTYPES,
    seed=st.integers(0, 2**31),
)
def test_ragged(
    kernel: str,
    lengths: list[tuple[int, int]],
    padding: int,
    heads: tuple[int, int],
    shared: bool,
    lam_kind: str,
    causal: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    g = torch.Generator().manual_seed(seed)
    q_lens, kv_lens = ([pair[i] for pair in lengths] for i in range(2))
    tokens, keys = sum(q_lens) + padding, sum(kv_lens) + padding
    q1, q2 = (oracle.draw(g, dtype, tokens, heads[0], 4) for _ in range(2))
    k1, k2 = (oracle.draw(g, dtype, keys, heads[1], 4) for _ in range(2))
    v = oracle.draw(g, dtype, keys, heads[1], 4 if shared else 8)
    lam = draw_lam(g, lam_kind, tokens, heads[0])
    for x, used in ((q1, q_lens), (q2, q_lens), (k1, kv_lens), (k2, kv_lens), (v, kv_lens)):
        x[sum(used) :] = math.nan
    if lam_kind == "tokens":
        lam[sum(q_lens) :] = math.nan
    cu_q, cu_k = (torch.tensor([0, *lens]).cumsum(0).int() for lens in (q_lens, kv_lens))
    out, lse1, lse2 = differential_attention_varlen(
        *(q1, k1, q2, None if shared else k2, v, lam, cu_q, cu_k),
        causal=causal,
        return_lse=True,
        kernel=kernel,
    )
    for i in range(len(lengths)):
        rows, seen = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
        expected = attend(
            *(q1[rows], k1[seen], q2[rows], None if shared else k2[seen], v[seen]),
            lam[rows] if lam_kind == "tokens" else lam,
            causal,
        )
        assert_close((out[rows], lse1[rows], lse2[rows]), expected, dtype)
    assert bool((out[sum(q_lens) :] == 0).all())
    assert bool((lse1[sum(q_lens) :] == -math.inf).all())
    assert bool((lse2[sum(q_lens) :] == -math.inf).all())


@pytest.mark.parametrize("kernel", on_cpu(PAGED_DIFFERENTIAL))
@given(
    lengths=st.lists(
        st.tuples(st.sampled_from([0, 1, 1, 1, 2, 5]), st.integers(0, 23)), max_size=5
    ),
    padding=st.integers(0, 2),
    heads=oracle.HEADS,
    k_dim=st.integers(1, 6),
    page_size=st.sampled_from([1, 2, 4, 16]),
    shared=st.booleans(),
    lam_kind=LAMBDAS,
    left=st.sampled_from([None, 0, 4]),
    dtype=oracle.DTYPES,
    apart=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_paged(
    kernel: str,
    lengths: list[tuple[int, int]],
    padding: int,
    heads: tuple[int, int],
    k_dim: int,
    page_size: int,
    shared: bool,
    lam_kind: str,
    left: int | None,
    dtype: torch.dtype,
    apart: bool,
    seed: int,
) -> None:
    dtype = dtype_for(kernel, dtype)
    g = torch.Generator().manual_seed(seed)
    width = k_dim if shared else 2 * k_dim
    paged = fill(
        g, lengths, heads, (width, width), page_size, dtype, padding=padding, left=left, apart=apart
    )
    q1 = paged.q[..., :k_dim]
    q2 = oracle.draw(g, dtype, *q1.shape)
    lam = draw_lam(g, lam_kind, *q1.shape[:-1])
    ends = paged.batch.cu_seqlens_q.tolist()
    if lam_kind == "tokens":
        lam[ends[-1] :] = math.nan
    before = paged.k_pages.clone(), paged.v_pages.clone()
    out, lse1, lse2 = paged_differential_attention(
        *(q1, q2, paged.k_pages, paged.v_pages, paged.batch, lam),
        window=(left, None),
        return_lse=True,
        kernel=kernel,
    )
    for i, (k, v) in enumerate(zip(paged.k, paged.v, strict=True)):
        rows = slice(ends[i], ends[i + 1])
        expected = attend(
            *(q1[rows], k[..., :k_dim], q2[rows], None if shared else k[..., k_dim:], v),
            lam[rows] if lam_kind == "tokens" else lam,
            True,
            (left, None),
        )
        assert_close((out[rows], lse1[rows], lse2[rows]), expected, dtype)
    assert bool((out[ends[-1] :] == 0).all())
    assert bool((lse2[ends[-1] :] == -math.inf).all())
    for pages, old in zip((paged.k_pages, paged.v_pages), before, strict=True):
        assert torch.equal(pages.nan_to_num(7), old.nan_to_num(7))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("lam_kind", ["pairs", "tokens"])
@pytest.mark.parametrize("ragged", [False, True])
def test_gradients(shared: bool, lam_kind: str, ragged: bool) -> None:
    """Numerical derivatives in every tensor, through out and both lse."""
    g = torch.Generator().manual_seed(0)
    shape = (6,) if ragged else (2, 3)
    q1, q2 = (oracle.draw(g, torch.float64, *shape, 2, 2) for _ in range(2))
    k1, k2 = (oracle.draw(g, torch.float64, *shape, 1, 2) for _ in range(2))
    v = oracle.draw(g, torch.float64, *shape, 1, 3)
    lam = torch.rand(2 if lam_kind == "pairs" else (*shape, 2), generator=g, dtype=torch.float64)
    inputs = [q1, k1, q2, v, lam] if shared else [q1, k1, q2, k2, v, lam]
    cu = torch.tensor([0, 2, 5], dtype=torch.int32)  # the last token is padding

    def run(*tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        given = [*tensors[:3], None, *tensors[3:]] if shared else list(tensors)
        if ragged:
            results = differential_attention_varlen(*given, cu, cu, causal=True, return_lse=True)
            return results[0][:5], results[1][:5], results[2][:5]
        return differential_attention(*given, causal=True, window=(1, None), return_lse=True)

    assert torch.autograd.gradcheck(run, [x.requires_grad_() for x in inputs])


def test_a_query_that_sees_nothing_has_no_gradient() -> None:
    q = torch.randn(1, 3, 2, 4, requires_grad=True)
    k = torch.randn(1, 1, 2, 4, requires_grad=True)
    v = torch.randn(1, 1, 2, 8)
    out = differential_attention(q, k, q, k, v, 0.5, causal=True)
    assert isinstance(out, Tensor)
    out.sum().backward()
    assert q.grad is not None
    assert bool((q.grad[:, :2] == 0).all())
    assert bool(q.grad.isfinite().all())


@pytest.mark.parametrize("kernel", ["auto", *on_cpu(DIFFERENTIAL)])
def test_lam_of_a_query_that_sees_nothing_is_not_read(kernel: str) -> None:
    q, k, v = torch.randn(1, 5, 2, 4), torch.randn(1, 2, 2, 4), torch.randn(1, 2, 2, 8)
    lam = torch.full((1, 5, 2), math.nan)
    lam[:, 3:] = 0.5
    inputs = [x.requires_grad_() for x in (q, k, v, lam)]
    out = differential_attention(q, k, 2 * q, k, v, lam, causal=True, kernel=kernel)
    assert isinstance(out, Tensor)
    assert bool((out[:, :3] == 0).all())
    gradients = torch.autograd.grad(out.sum(), inputs)
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)
    assert bool((gradients[3][:, :3] == 0).all())


def test_schemas() -> None:
    g = torch.Generator().manual_seed(0)
    q1, q2 = (oracle.draw(g, torch.float32, 1, 9, 4, 3).requires_grad_() for _ in range(2))
    k1, k2 = (oracle.draw(g, torch.float32, 1, 9, 2, 3).requires_grad_() for _ in range(2))
    v = oracle.draw(g, torch.float32, 1, 9, 2, 6).requires_grad_()
    lam = torch.rand(4).requires_grad_()
    opcheck(DIFFERENTIAL, q1, k1, q2, k2, v, lam, -1, 0, 0.5)
    opcheck(DIFFERENTIAL, q1, k1, q2, None, v, lam, -1, 0, 0.5)
    cu = torch.tensor([0, 4, 9], dtype=torch.int32)
    flat = [x.detach()[0] for x in (q1, k1, q2, k2, v)]
    opcheck(DIFFERENTIAL_VARLEN, *flat, lam, cu, cu, 9, 9, -1, 0, 0.5)
    out, lse1, lse2 = DIFFERENTIAL.handle(q1, k1, q2, k2, v, lam, -1, 0, 0.5, "auto")
    saved = [x.detach() for x in (lse1, lse2, out, lse1, lse2)]
    plain = [x.detach() for x in (q1, k1, q2, k2, v, lam)]
    opcheck(DIFFERENTIAL_BACKWARD, *plain, *saved, -1, 0, 0.5)
    opcheck(
        DIFFERENTIAL_VARLEN_BACKWARD,
        *(*flat, plain[5], cu, cu, 9, 9, *(x[0] for x in saved), -1, 0, 0.5),
    )
    paged = fill(g, [(2, 9), (1, 3)], (4, 2), (6, 6), 4, torch.float32, garbage=0)
    batch = paged.batch
    opcheck(
        PAGED_DIFFERENTIAL,
        *(paged.q[..., :3], paged.q[..., 3:]),
        *(paged.k_pages.nan_to_num(), paged.v_pages.nan_to_num(), plain[5]),
        *(batch.cu_seqlens_q, batch.kv_lens, batch.page_table, 2, 9, -1, 0, 0.5, None, []),
    )


def test_under_torch_compile() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, lam: Tensor) -> Tensor:
        out = differential_attention(
            q[..., 0::2, :], k[..., 0::2, :], q[..., 1::2, :], k[..., 1::2, :], v, lam, causal=True
        )
        assert isinstance(out, Tensor)
        return out

    g = torch.Generator().manual_seed(0)
    q, k = (oracle.draw(g, torch.float32, 1, 9, 4, 3).requires_grad_() for _ in range(2))
    v, lam = oracle.draw(g, torch.float32, 1, 9, 2, 6), torch.rand(2).requires_grad_()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v, lam), run(q, k, v, lam))
    compiled(q, k, v, lam).sum().backward()
    assert lam.grad is not None


X = torch.zeros(1, 5, 4, 8)
V = torch.zeros(1, 5, 2, 16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q2": X[:, :4]}, r"q2 has shape \[1, 4, 4, 8\]; expected the shape of q1"),
        ({"k2": X}, r"k2 has shape \[1, 5, 4, 8\]; expected the shape of k1"),
        (
            {"lam": torch.zeros(3)},
            r"lam has shape \[3\]; expected a number, \[num_q_pairs\] = \[4\]",
        ),
        ({"lam": math.nan}, "lam is nan; give a finite number or a tensor"),
        ({"lam": 1e300}, "lam is 1e[+]300; give a finite number or a tensor"),
        ({"lam": 10**400}, "give a finite number or a tensor"),
        ({"q2": None}, "q2 is None; it must be a tensor"),
        ({"lam": "half"}, "lam is 'half'; give a finite number or a tensor"),
        ({"lam": torch.zeros(4, dtype=torch.int32)}, "lam has dtype torch.int32; convert it"),
        ({"v": V.double()}, "v is torch.float64 but q1 is torch.float32"),
        ({"q1": X[:, :, :3]}, "3 query heads do not divide into groups over 2 key-value heads"),
    ],
)
def test_refusals(change: dict[str, object], message: str) -> None:
    arguments = {"q1": X, "k1": X[:, :, :2], "q2": X, "k2": X[:, :, :2], "v": V, "lam": 0.5}
    with pytest.raises(ValueError, match=message):
        differential_attention(**(arguments | change))


def test_paged_refusals() -> None:
    g = torch.Generator().manual_seed(0)
    paged = fill(g, [(2, 9)], (4, 2), (6, 6), 4, torch.float32)
    q = paged.q[..., :4]
    with pytest.raises(
        ValueError, match=r"q1 has dim 4 and k_pages has dim 6; a slot must hold .*8"
    ):
        paged_differential_attention(q, q, paged.k_pages, paged.v_pages, paged.batch, 0.5)
    q = paged.q[..., :3]
    narrow = [x.to(torch.float8_e4m3fn) for x in (paged.k_pages, paged.v_pages)]
    with pytest.raises(ValueError, match="k_pages is torch.float8_e4m3fn but q1 is torch.float32"):
        paged_differential_attention(q, q, *narrow, paged.batch, 0.5)
    with pytest.raises(NotImplementedError, match="use differential_attention_varlen"):
        paged_differential_attention(
            *(q, q, paged.k_pages, paged.v_pages, paged.batch, torch.rand(4, requires_grad=True))
        )
