"""Dense and ragged attention against a float64 oracle: values, lse, gradients, contracts."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rooftile.ops.attention import (
    ATTENTION,
    ATTENTION_BACKWARD,
    ATTENTION_VARLEN,
    attention,
    attention_varlen,
)
from tests.ops import attention_oracle as oracle
from tests.ops.accuracy import opcheck

LENGTHS = st.integers(0, 12)
# The GPU families have tests of their own: tests/kernels, and tests/ops/test_attention_gpu.py.
ON_A_CPU = ("torch", "reference")


@pytest.mark.parametrize("kernel", ["torch", "reference"])
@given(
    batch=st.integers(0, 3),
    q_len=LENGTHS,
    kv_len=LENGTHS,
    heads=oracle.HEADS,
    k_dim=st.integers(1, 20),
    v_dim=st.integers(1, 20),
    dtype=oracle.DTYPES,
    causal=st.booleans(),
    window=oracle.WINDOWS,
    softcap=oracle.SOFTCAPS,
    sink_kind=oracle.SINKS,
    scale=st.sampled_from([None, 0.3, -0.2, 0.0]),
    strided=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_dense_equals_the_oracle(
    kernel: str,
    batch: int,
    q_len: int,
    kv_len: int,
    heads: tuple[int, int],
    k_dim: int,
    v_dim: int,
    dtype: torch.dtype,
    causal: bool,
    window: tuple[int | None, int | None] | None,
    softcap: float,
    sink_kind: float | None,
    scale: float | None,
    strided: bool,
    seed: int,
) -> None:
    if kernel == "torch":
        v_dim, softcap = k_dim, 0.0
    g = torch.Generator().manual_seed(seed)
    q = oracle.draw(g, dtype, batch, q_len, heads[0], k_dim, strided=strided)
    k = oracle.draw(g, dtype, batch, kv_len, heads[1], k_dim, strided=strided)
    v = oracle.draw(g, dtype, batch, kv_len, heads[1], v_dim, strided=strided)
    sink = oracle.sink_of(g, heads[0], sink_kind)
    options = {
        "causal": causal,
        "window": window,
        "softcap": softcap,
        "sink": sink,
        "softmax_scale": scale,
    }
    out, lse = attention(q, k, v, **options, return_lse=True, kernel=kernel)
    assert out.shape == (batch, q_len, heads[0], v_dim)
    for i in range(batch):
        expected = oracle.attend(q[i], k[i], v[i], **options)
        oracle.assert_attention_close((out[i], lse[i]), expected, dtype)


@pytest.mark.parametrize("kernel", ["torch", "reference"])
@given(
    lengths=st.lists(st.tuples(LENGTHS, LENGTHS), max_size=4),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    heads=oracle.HEADS,
    dtype=oracle.DTYPES,
    index_dtype=st.sampled_from([torch.int32, torch.int64]),
    causal=st.booleans(),
    window=oracle.WINDOWS,
    softcap=oracle.SOFTCAPS,
    sink_kind=oracle.SINKS,
    seed=st.integers(0, 2**32),
)
def test_varlen_equals_the_oracle_and_ignores_padding(
    kernel: str,
    lengths: list[tuple[int, int]],
    padding: tuple[int, int],
    heads: tuple[int, int],
    dtype: torch.dtype,
    index_dtype: torch.dtype,
    causal: bool,
    window: tuple[int | None, int | None] | None,
    softcap: float,
    sink_kind: float | None,
    seed: int,
) -> None:
    if kernel == "torch":
        softcap = 0.0
    g = torch.Generator().manual_seed(seed)
    cu_q, cu_k = (
        torch.tensor([0, *(pair[side] for pair in lengths)], dtype=index_dtype).cumsum(0)
        for side in (0, 1)
    )
    cu_q, cu_k = cu_q.to(index_dtype), cu_k.to(index_dtype)
    q = oracle.draw(g, dtype, int(cu_q[-1]) + padding[0], heads[0], 8)
    k = oracle.draw(g, dtype, int(cu_k[-1]) + padding[1], heads[1], 8)
    v = oracle.draw(g, dtype, int(cu_k[-1]) + padding[1], heads[1], 8)
    q[int(cu_q[-1]) :] = math.nan
    k[int(cu_k[-1]) :], v[int(cu_k[-1]) :] = math.inf, math.nan
    sink = oracle.sink_of(g, heads[0], sink_kind)
    options = {"causal": causal, "window": window, "softcap": softcap, "sink": sink}
    out, lse = attention_varlen(q, k, v, cu_q, cu_k, **options, return_lse=True, kernel=kernel)
    for i in range(len(lengths)):
        queries, keys = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
        expected = oracle.attend(q[queries], k[keys], v[keys], **options)
        oracle.assert_attention_close((out[queries], lse[queries]), expected, dtype)
    assert bool((out[int(cu_q[-1]) :] == 0).all())
    assert bool((lse[int(cu_q[-1]) :] == -math.inf).all())


@pytest.mark.parametrize(
    ("q_len", "kv_len", "window"),
    [
        (300, 300, None),
        (300, 700, None),
        (600, 310, None),
        (513, 513, (40, None)),
        (270, 300, (3, 5)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_long_rows_stay_within_twice_the_error_of_torch(
    q_len: int, kv_len: int, window: tuple[int | None, int | None] | None, dtype: torch.dtype
) -> None:
    g = torch.Generator().manual_seed(q_len)
    q, k, v = (oracle.draw(g, dtype, 1, n, 2, 16) for n in (q_len, kv_len, kv_len))
    causal = window is None
    exact, exact_lse = attention(
        *(x.double() for x in (q, k, v)),
        causal=causal,
        window=window,
        return_lse=True,
        kernel="reference",
    )
    rows, columns = torch.arange(kv_len - q_len, kv_len)[:, None], torch.arange(kv_len)
    left, right = (None, 0) if window is None else window
    mask = columns <= rows + (kv_len if right is None else right)
    if left is not None:
        mask &= columns >= rows - left
    plain = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=mask
    ).transpose(1, 2)
    floor = 4 * torch.finfo(dtype).eps * (0.1 + exact.abs().amax(-1))
    torch_error = (plain.double() - exact).abs().amax(-1)
    # A row that torch happens to hit, on this CPU, is no yardstick: its largest error of a head is one.
    allowed = torch.maximum(2 * torch_error, torch_error.amax(1, keepdim=True)) + floor
    for kernel in ON_A_CPU:
        out, lse = attention(q, k, v, causal=causal, window=window, return_lse=True, kernel=kernel)
        assert bool(((out.double() - exact).abs().amax(-1) <= allowed).all()), kernel
        oracle.assert_lse_close(lse, exact_lse, dtype)


def leaves(*shapes: tuple[int, ...]) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=g, dtype=torch.float64).requires_grad_() for s in shapes]


@pytest.mark.parametrize("window", [None, (1, 2)])
@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("has_sink", [False, True])
def test_gradients(window: tuple[int, int] | None, softcap: float, has_sink: bool) -> None:
    tensors = leaves((2, 3, 4, 3), (2, 5, 2, 3), (2, 5, 2, 2), *([(4,)] if has_sink else []))

    def call(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None = None) -> object:
        options = {"causal": window is None, "window": window, "softcap": softcap, "sink": sink}
        return attention(q, k, v, **options, return_lse=True)

    assert torch.autograd.gradcheck(call, tensors)


@pytest.mark.parametrize("has_sink", [False, True])
def test_gradients_of_ragged_batches(has_sink: bool) -> None:
    tensors = leaves((5, 2, 3), (7, 1, 3), (7, 1, 2), *([(2,)] if has_sink else []))
    cu_q, cu_k = torch.tensor([0, 2, 2, 5]), torch.tensor([0, 3, 4, 7])

    def call(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None = None) -> object:
        return attention_varlen(q, k, v, cu_q, cu_k, causal=True, sink=sink, return_lse=True)

    assert torch.autograd.gradcheck(call, tensors)


def test_gradients_of_rows_that_see_nothing_are_zero() -> None:
    q, k, v = leaves((1, 4, 2, 3), (1, 2, 2, 3), (1, 2, 2, 3))
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    assert lse[0, :2].eq(-math.inf).all()
    # exp(lse) is what a merge computes: its gradient through the -inf rows is 0, not NaN.
    (out.sum() + lse.exp().sum()).backward()
    assert q.grad is not None
    assert bool((q.grad[0, :2] == 0).all())
    assert all(bool(x.grad.isfinite().all()) for x in (q, k, v))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_stay_within_twice_the_error_of_torch(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(3)
    inputs = [oracle.draw(g, dtype, 2, 65, 3, 16) for _ in range(3)]
    weight = torch.randn(2, 65, 3, 16, generator=g, dtype=torch.float64)

    def gradients(wide: bool, function: object) -> list[Tensor]:
        xs = [(x.double() if wide else x).clone().requires_grad_() for x in inputs]
        function(*xs).backward(weight.to(xs[0].dtype))  # type: ignore[operator]
        return [x.grad.double() for x in xs]  # type: ignore[union-attr]

    def plain(*xs: Tensor) -> Tensor:
        heads_first = (x.transpose(1, 2) for x in xs)
        sdpa = torch.nn.functional.scaled_dot_product_attention
        return sdpa(*heads_first, is_causal=True).transpose(1, 2)

    def ours(*xs: Tensor) -> Tensor:
        return attention(*xs, causal=True)  # type: ignore[return-value]

    exact = gradients(True, plain)
    for mine, theirs, e in zip(gradients(False, ours), gradients(False, plain), exact, strict=True):
        # Gradients are sums of terms of size 1 that may cancel.
        floor = 4 * torch.finfo(dtype).eps * (1 + e.abs().amax(-1))
        allowed = 2 * (theirs - e).abs().amax(-1) + floor
        assert bool(((mine - e).abs().amax(-1) <= allowed).all())


@pytest.mark.parametrize("kernel", ON_A_CPU)
def test_a_sink_far_above_takes_everything_and_an_empty_row_keeps_it(kernel: str) -> None:
    q, k = torch.randn(1, 3, 2, 8), torch.randn(1, 1, 2, 8)
    sink = torch.tensor([1e30, -2.0])
    out, lse = attention(q, k, k, causal=True, sink=sink, return_lse=True, kernel=kernel)
    assert bool((out[:, :, 0] == 0).all())
    assert torch.equal(lse[0, :, 0], sink[:1].expand(3))
    assert bool((out[:, :2] == 0).all())
    assert torch.equal(lse[0, :2, 1], sink[1:].expand(2))


@pytest.mark.parametrize("kernel", ON_A_CPU)
@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 7), (5, 7), (7, 7), (70, 70)])
@pytest.mark.parametrize("causal", [False, True])
def test_nan_reaches_every_row_that_sees_it(
    kernel: str, q_len: int, kv_len: int, causal: bool
) -> None:
    g = torch.Generator().manual_seed(0)
    q = oracle.draw(g, torch.float32, 1, q_len, 2, 8)
    k, v = (oracle.draw(g, torch.float32, 1, kv_len, 1, 8) for _ in range(2))
    row = min(2, q_len - 1)
    q[0, row, 0, 3] = math.nan
    out, lse = attention(q, k, v, causal=causal, return_lse=True, kernel=kernel)
    expected = torch.zeros(1, q_len, 2, dtype=torch.bool)
    expected[0, row, 0] = True
    assert torch.equal(lse.isnan(), expected)
    assert torch.equal(out.isnan(), expected[..., None].expand(out.shape))  # type: ignore[union-attr]


def test_opcheck() -> None:
    q, k, v, sink = (x.float().detach().requires_grad_() for x in leaves((1, 3, 4, 8), (1, 5, 2, 8), (1, 5, 2, 8), (4,)))  # fmt: skip
    opcheck(ATTENTION, q, k, v, None, -1, 0, 0.0, 0.5)
    opcheck(ATTENTION, q, k, v, sink, 2, -1, 3.0, 0.5)
    with torch.no_grad():
        out, lse = attention(q, k, v, return_lse=True)
        opcheck(ATTENTION_BACKWARD, q, k, v, sink, out, lse, out, lse, 2, -1, 3.0, 0.5)
    cu = torch.tensor([0, 1, 3])
    ragged = (x.detach()[0].requires_grad_() for x in (q, k, v))
    opcheck(ATTENTION_VARLEN, *ragged, cu, cu, 3, 5, sink, -1, 0, 0.0, 0.5)


def test_compiles_whole() -> None:
    q, k, v = (x.float() for x in leaves((1, 3, 4, 8), (1, 5, 2, 8), (1, 5, 2, 8)))
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, v, causal=True), attention(q, k, v, causal=True))
    cu = torch.tensor([0, 1, 3])
    ragged = (q[0], k[0], v[0], cu, cu)
    compiled = torch.compile(attention_varlen, fullgraph=True, backend="aot_eager")
    options = {"window": (1, None), "max_q_len": 3, "max_kv_len": 3}
    assert torch.equal(compiled(*ragged, **options), attention_varlen(*ragged, **options))


def test_refusals_name_the_value_and_the_remedy() -> None:
    q, k = torch.randn(1, 2, 4, 8), torch.randn(1, 3, 2, 8)
    for message, call in {
        r"q has shape \[2, 4, 8\]; expected \[batch": lambda: attention(q[0], k, k),
        "q has dim 8 and k has dim 7": lambda: attention(q, k[..., :7], k),
        "k is torch.float64 but q is torch.float32": lambda: attention(q, k.double(), k),
        "4 query heads do not divide.*over 3": lambda: attention(q, *[torch.randn(1, 3, 3, 8)] * 2),
        "q has batch 1 but k has batch 2": lambda: attention(q, *[k.expand(2, 3, 2, 8)] * 2),
        r"window is \(-1, 0\)": lambda: attention(q, k, k, window=(-1, 0)),
        "softcap is -1": lambda: attention(q, k, k, softcap=-1.0),
        "softmax_scale is nan": lambda: attention(q, k, k, softmax_scale=math.nan),
        "softmax_scale is 1000": lambda: attention(q, k, k, softmax_scale=10**400),
        "softmax_scale is 'big'": lambda: attention(q, k, k, softmax_scale="big"),  # type: ignore[arg-type]
        r"softmax_scale is tensor\(0.5": lambda: attention(
            q,
            k,
            k,
            softmax_scale=torch.tensor(0.5, requires_grad=True),  # type: ignore[arg-type]
        ),
        "softcap is 1e-300; it must be 0, which turns it off, or a number from 1e-37": lambda: (
            attention(q, k, k, softcap=1e-300)
        ),
        r"softcap is 1e\+300": lambda: attention(q, k, k, softcap=1e300),
        "softcap is None": lambda: attention(q, k, k, softcap=None),  # type: ignore[arg-type]
        r"window is 5; expected \(left": lambda: attention(q, k, k, window=5),  # type: ignore[arg-type]
        r"sink has shape \[2\]; expected \[num_q_heads\] = \[4\]": lambda: attention(
            q, k, k, sink=torch.zeros(2)
        ),
        "kernel='numpy' does not exist": lambda: attention(q, k, k, kernel="numpy"),
    }.items():
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(NotImplementedError, match="'gluon' cannot run this call: "):
        attention(q, k, k, kernel="gluon")
    with pytest.raises(NotImplementedError, match="'torch' cannot run.*no softcap"):
        attention(q, k, k, softcap=1.0, kernel="torch")
    with pytest.raises(NotImplementedError, match="needs k_dim = v_dim, got 8 and 5"):
        attention(q, k, k[..., :5], kernel="torch")


def test_refusals_of_lengths() -> None:
    q, k, good = torch.randn(4, 2, 8), torch.randn(6, 2, 8), torch.tensor([0, 2, 4])

    def call(cu_q: Tensor, cu_k: Tensor, **options: int) -> object:
        return attention_varlen(q, k, k, cu_q, cu_k, **options)

    for message, arguments in {
        "cu_seqlens_q begins with 1": (torch.tensor([1, 2, 4]), good),
        "cu_seqlens_k decreases to -1": (good, torch.tensor([0, 3, 2])),
        "cu_seqlens_k ends with 7 but k has 6 tokens": (good, torch.tensor([0, 3, 7])),
        "cu_seqlens_q has 3 entries but cu_seqlens_k has 2": (good, good[:2]),
        "cu_seqlens_q has dtype torch.float32": (good.float(), good),
    }.items():
        with pytest.raises(ValueError, match=message):
            call(*arguments)
    with pytest.raises(ValueError, match="a sequence of 2 tokens but max_q_len is 1"):
        call(good, good, max_q_len=1)
