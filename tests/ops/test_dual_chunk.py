"""Dual chunk attention: against the full matrix of positions, in float64, pair by pair."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from rooftile.ops.dual_chunk import (
    DUAL_CHUNK,
    DUAL_CHUNK_VARLEN,
    PAGED_DUAL_CHUNK,
    dual_chunk_attention,
    dual_chunk_attention_varlen,
    paged_dual_chunk_attention,
)
from rooftile.ops.dual_chunk_rotary import (
    DUAL_CHUNK_ROTARY,
    DualChunkConfig,
    dual_chunk_rotary_embedding,
)
from rooftile.ops.operator import GPU_FAMILIES, Operator
from rooftile.ops.rope import rotary_embedding
from rooftile.ops.rotary_table import RotaryConfig, rotary_table
from rooftile.types import PagedBatch
from tests.ops import attention_oracle as oracle
from tests.ops.accuracy import assert_rows_close, dtype_for, opcheck
from tests.ops.test_paged import fill

CHUNKS = st.sampled_from([(2, 1), (5, 1), (5, 3), (6, 5), (9, 2), (12, 4), (64, 16)])
# On either side of a border, of two and of three chunks, and below one.
LENGTHS = st.one_of(st.integers(0, 40), st.sampled_from([15, 16, 17, 23, 24, 25, 48, 49]))
TABLE = rotary_table(RotaryConfig(8, 50.0), 70)


def on_cpu(operator: Operator) -> list[str]:
    """GPU kernels have tests of their own, in tests/kernels."""
    return [family for family in operator.families if family not in GPU_FAMILIES]


def positions_of(chunk_size: int, local_size: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of queries [i, j] and keys [j], and which of three queries meets key j: the definition."""
    chunk = chunk_size - local_size
    query, kind = (torch.zeros(length, length, dtype=torch.int64) for _ in range(2))
    for i in range(length):
        for j in range(length):
            kind[i, j] = min(max(i // chunk - j // chunk, 0), 2)
            query[i, j] = (
                i % chunk,
                min(i % chunk + chunk, chunk_size),
                min(2 * chunk - 1, chunk_size),
            )[int(kind[i, j])]
    return query, torch.arange(length) % chunk, kind


def attend(
    queries: tuple[Tensor, Tensor, Tensor],  # each [q_len, num_q_heads, k_dim]
    k: Tensor,  # [kv_len, num_kv_heads, k_dim]
    v: Tensor,  # [kv_len, num_kv_heads, v_dim]
    chunk: tuple[int, int],
    softcap: float = 0.0,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Row by row in float64."""
    wide = [q.double() for q in queries]
    k, v = k.double(), v.double()
    q_len, heads, dim = wide[0].shape
    kv_len, group = k.shape[0], heads // k.shape[1]
    scale = dim**-0.5 if scale is None else scale
    _, _, kind = positions_of(*chunk, kv_len)
    out = torch.zeros(q_len, heads, v.shape[-1], dtype=torch.float64)
    lse = torch.full((q_len, heads), -math.inf, dtype=torch.float64)
    for i in range(q_len):
        at = kv_len - q_len + i
        for h in range(heads) if at >= 0 else ():
            met = torch.stack([wide[int(kind[at, j])][i, h] for j in range(at + 1)])
            logits = (met * k[: at + 1, h // group]).sum(-1) * scale
            if softcap:
                logits = softcap * torch.tanh(logits / softcap)
            lse[i, h] = torch.logsumexp(logits, 0)
            out[i, h] = torch.softmax(logits, 0) @ v[: at + 1, h // group]
    return out, lse


def draw_queries(
    g: torch.Generator, dtype: torch.dtype, *shape: int, strided: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    one, two, three = (oracle.draw(g, dtype, *shape, strided=strided) for _ in range(3))
    return one, two, three


@pytest.mark.parametrize("kernel", on_cpu(DUAL_CHUNK))
@given(
    batch=st.integers(0, 2),
    q_len=LENGTHS,
    kv_len=LENGTHS,
    heads=oracle.HEADS,
    dims=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    chunk=CHUNKS,
    dtype=oracle.DTYPES,
    softcap=oracle.SOFTCAPS,
    scale=st.sampled_from([None, 0.3, -0.2, 0.0]),
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
    chunk: tuple[int, int],
    dtype: torch.dtype,
    softcap: float,
    scale: float | None,
    strided: bool,
    seed: int,
) -> None:
    if kernel == "torch":
        dims, softcap = (dims[0], dims[0]), 0.0
    q_len = min(q_len, 12)
    g = torch.Generator().manual_seed(seed)
    queries = draw_queries(g, dtype, batch, q_len, heads[0], dims[0], strided=strided)
    k = oracle.draw(g, dtype, batch, kv_len, heads[1], dims[0], strided=strided)
    v = oracle.draw(g, dtype, batch, kv_len, heads[1], dims[1], strided=strided)
    out, lse = dual_chunk_attention(
        *(*queries, k, v),
        chunk_size=chunk[0],
        local_size=chunk[1],
        softcap=softcap,
        softmax_scale=scale,
        return_lse=True,
        kernel=kernel,
    )
    for b in range(batch):
        one = (queries[0][b], queries[1][b], queries[2][b])
        expected = attend(one, k[b], v[b], chunk, softcap, scale)
        oracle.assert_attention_close((out[b], lse[b]), expected, dtype)


@pytest.mark.parametrize("kernel", on_cpu(DUAL_CHUNK_VARLEN))
@given(
    lengths=st.lists(
        st.tuples(st.sampled_from([0, 1, 2, 9]), st.sampled_from([0, 1, 8, 20, 33])), max_size=4
    ),
    padding=st.integers(0, 2),
    heads=oracle.HEADS,
    chunk=CHUNKS,
    dtype=oracle.DTYPES,
    seed=st.integers(0, 2**31),
)
def test_ragged(
    kernel: str,
    lengths: list[tuple[int, int]],
    padding: int,
    heads: tuple[int, int],
    chunk: tuple[int, int],
    dtype: torch.dtype,
    seed: int,
) -> None:
    g = torch.Generator().manual_seed(seed)
    q_lens, kv_lens = ([pair[i] for pair in lengths] for i in range(2))
    queries = draw_queries(g, dtype, sum(q_lens) + padding, heads[0], 6)
    k, v = (oracle.draw(g, dtype, sum(kv_lens) + padding, heads[1], 6) for _ in range(2))
    for x, used in ((k, kv_lens), (v, kv_lens), *((q, q_lens) for q in queries)):
        x[sum(used) :] = math.nan
    cu_q, cu_k = (torch.tensor([0, *lens]).cumsum(0).int() for lens in (q_lens, kv_lens))
    out, lse = dual_chunk_attention_varlen(
        *(*queries, k, v, cu_q, cu_k),
        chunk_size=chunk[0],
        local_size=chunk[1],
        return_lse=True,
        kernel=kernel,
    )
    for i in range(len(lengths)):
        rows, keys = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
        expected = attend(
            (queries[0][rows], queries[1][rows], queries[2][rows]), k[keys], v[keys], chunk
        )
        oracle.assert_attention_close((out[rows], lse[rows]), expected, dtype)
    assert bool((out[sum(q_lens) :] == 0).all())
    assert bool((lse[sum(q_lens) :] == -math.inf).all())


@pytest.mark.parametrize("kernel", on_cpu(PAGED_DUAL_CHUNK))
@given(
    lengths=st.lists(
        st.tuples(st.sampled_from([0, 1, 1, 1, 2, 9]), st.sampled_from([0, 1, 8, 16, 20, 33])),
        max_size=4,
    ),
    padding=st.integers(0, 2),
    heads=oracle.HEADS,
    page_size=st.sampled_from([1, 2, 4, 16]),
    chunk=CHUNKS,
    dtype=oracle.DTYPES,
    softcap=oracle.SOFTCAPS,
    apart=st.booleans(),
    seed=st.integers(0, 2**31),
)
@example(  # chunks of 8 tokens are two whole pages, and nothing is cut
    lengths=[(9, 33), (1, 17)],
    padding=1,
    heads=(4, 2),
    page_size=4,
    chunk=(12, 4),
    dtype=torch.float32,
    softcap=0.0,
    apart=False,
    seed=0,
)
def test_paged(
    kernel: str,
    lengths: list[tuple[int, int]],
    padding: int,
    heads: tuple[int, int],
    page_size: int,
    chunk: tuple[int, int],
    dtype: torch.dtype,
    softcap: float,
    apart: bool,
    seed: int,
) -> None:
    if kernel == "torch":
        softcap = 0.0
    dtype = dtype_for(kernel, dtype)
    if kernel == "cpu":
        page_size = math.gcd(page_size, chunk[0] - chunk[1])
    g = torch.Generator().manual_seed(seed)
    paged = fill(g, lengths, heads, (6, 6), page_size, dtype, padding=padding, apart=apart)
    queries = (paged.q, *(oracle.draw(g, dtype, *paged.q.shape) for _ in range(2)))
    before = paged.k_pages.clone(), paged.v_pages.clone()
    out, lse = paged_dual_chunk_attention(
        *(*queries, paged.k_pages, paged.v_pages, paged.batch),
        chunk_size=chunk[0],
        local_size=chunk[1],
        softcap=softcap,
        return_lse=True,
        kernel=kernel,
    )
    ends = paged.batch.cu_seqlens_q.tolist()
    for i, (k, v) in enumerate(zip(paged.k, paged.v, strict=True)):
        rows = slice(ends[i], ends[i + 1])
        one = (queries[0][rows], queries[1][rows], queries[2][rows])
        oracle.assert_attention_close(
            (out[rows], lse[rows]), attend(one, k, v, chunk, softcap), dtype
        )
    assert bool((out[ends[-1] :] == 0).all())
    assert bool((lse[ends[-1] :] == -math.inf).all())
    for pages, old in zip((paged.k_pages, paged.v_pages), before, strict=True):
        assert torch.equal(pages.nan_to_num(7), old.nan_to_num(7))


@given(
    length=st.integers(1, 40),
    chunk=CHUNKS,
    original=st.sampled_from([None, 4, 30]),
    interleaved=st.booleans(),
    head_dim=st.sampled_from([8, 11]),
    seed=st.integers(0, 2**31),
)
def test_rotated_and_attended_equals_the_matrix_of_positions(
    length: int,
    chunk: tuple[int, int],
    original: int | None,
    interleaved: bool,
    head_dim: int,
    seed: int,
) -> None:
    """From unrotated q and k: the score of a pair is q turned by a relative position, times k."""
    g = torch.Generator().manual_seed(seed)
    q, k, v = (oracle.draw(g, torch.float64, length, 2, head_dim) for _ in range(3))
    query, key, _ = positions_of(*chunk, length)
    scores = torch.full((2, length, length), -math.inf, dtype=torch.float64)
    for i in range(length):
        factor = max(1.0, 0.1 * math.log((i + 1) / original) + 1) ** 2 if original else 1.0
        for j in range(i + 1):
            turned = rotary_embedding(
                q[i, None], query[i, j, None], TABLE, interleaved=interleaved, kernel="reference"
            )[0]
            fixed = rotary_embedding(
                k[j, None], key[j, None], TABLE, interleaved=interleaved, kernel="reference"
            )[0]
            scores[:, i, j] = (turned * fixed).sum(-1) * factor / math.sqrt(head_dim)
    expected = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v)

    at = torch.arange(length)
    queries = dual_chunk_rotary_embedding(
        *(q, at, TABLE),
        chunk_size=chunk[0],
        local_size=chunk[1],
        original_max_position=original,
        interleaved=interleaved,
    )
    keys = rotary_embedding(
        k, at % (chunk[0] - chunk[1]), TABLE, interleaved=interleaved, kernel="reference"
    )
    out = dual_chunk_attention(
        *(q[None] for q in (*queries, keys, v)), chunk_size=chunk[0], local_size=chunk[1]
    )
    assert isinstance(out, Tensor)
    torch.testing.assert_close(out[0], expected, rtol=1e-6, atol=1e-7)


def test_within_one_chunk_it_is_plain_attention() -> None:
    g = torch.Generator().manual_seed(0)
    q, k, v = (oracle.draw(g, torch.float64, 1, 30, 2, 8) for _ in range(3))
    nan = torch.full_like(q, math.nan)  # never met
    out, lse = dual_chunk_attention(
        q, nan, nan, k, v, chunk_size=40, local_size=10, return_lse=True, kernel="torch"
    )
    oracle.assert_attention_close(
        (out[0], lse[0]), oracle.attend(q[0], k[0], v[0], causal=True), torch.float64
    )


def test_distances_are_true_within_a_chunk_and_near_its_border() -> None:
    """What the paper promises: true distances among the local_size nearest tokens, none too large."""
    chunk_size, local_size = 12, 4
    query, key, kind = positions_of(chunk_size, local_size, 60)
    distance = query - key
    rows, columns = torch.meshgrid(torch.arange(60), torch.arange(60), indexing="ij")
    seen = columns <= rows
    near = seen & ((rows - columns < local_size) | (kind == 0))
    assert torch.equal(distance[near], (rows - columns)[near])
    assert int(distance[seen].min()) == 0
    assert int(distance[seen].max()) == chunk_size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_queries_round_once(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(1)
    q = oracle.draw(g, dtype, 50, 3, 11, strided=True)
    at = torch.randint(0, 10_000_000, (50,), generator=g)
    options = {"chunk_size": 64, "local_size": 16, "original_max_position": 100}
    got = dual_chunk_rotary_embedding(q, at, TABLE, **options)
    exact = dual_chunk_rotary_embedding(q.double(), at, TABLE, **options)
    for x, y in zip(got, exact, strict=True):
        assert x.dtype == dtype
        assert_rows_close(x, y, dtype)


def test_the_last_position_of_an_int32() -> None:
    q, last = torch.randn(1, 2, 8), torch.tensor([2**31 - 1])
    options = {"chunk_size": 2**20, "local_size": 1, "original_max_position": 100}
    table = TABLE[:1].expand(2**20 + 1, -1, -1)
    narrow, wide = (
        torch.stack(dual_chunk_rotary_embedding(q, at, table, **options))
        for at in (last.int(), last)
    )
    assert torch.equal(narrow, wide)
    assert bool(narrow.isfinite().all())


def test_lengths_take_the_place_of_positions_in_the_factor() -> None:
    q, at = torch.ones(3, 1, 8), torch.tensor([0, 5, 199])
    options = {"chunk_size": 64, "local_size": 16, "original_max_position": 10}
    whole = dual_chunk_rotary_embedding(
        q, at, TABLE, lengths=torch.full((3,), 200), **options
    )  # fmt: skip
    own = dual_chunk_rotary_embedding(q, at, TABLE, **options)
    plain = dual_chunk_rotary_embedding(q, at, TABLE, chunk_size=64, local_size=16)
    factor = (0.1 * math.log(20) + 1) ** 2
    for a, b, c in zip(whole, own, plain, strict=True):
        torch.testing.assert_close(a, c * factor)
        torch.testing.assert_close(a[2], b[2])
        torch.testing.assert_close(b[:2], c[:2])


def test_schemas() -> None:
    g = torch.Generator().manual_seed(0)
    queries = draw_queries(g, torch.float32, 1, 9, 2, 4)
    k, v = (oracle.draw(g, torch.float32, 1, 9, 1, 4) for _ in range(2))
    opcheck(DUAL_CHUNK, *queries, k, v, 4, 0.0, 0.5)
    cu = torch.tensor([0, 4, 9], dtype=torch.int32)
    flat = tuple(q[0] for q in queries)
    opcheck(DUAL_CHUNK_VARLEN, *flat, k[0], v[0], cu, cu, 9, 9, 4, 0.0, 0.5)
    paged = fill(g, [(2, 9), (1, 3)], (2, 1), (4, 4), 4, torch.float32, garbage=0)
    batch = paged.batch
    opcheck(
        PAGED_DUAL_CHUNK,
        *(paged.q, paged.q, paged.q, paged.k_pages.nan_to_num(), paged.v_pages.nan_to_num()),
        *(batch.cu_seqlens_q, batch.kv_lens, batch.page_table, 2, 9, 4, 0.0, 0.5, None, []),
    )
    at = torch.arange(9)
    opcheck(DUAL_CHUNK_ROTARY, flat[0].repeat(1, 1, 2), at, None, TABLE, False, 12, 4, 6)


def test_under_torch_compile() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, at: Tensor) -> Tensor:
        queries = dual_chunk_rotary_embedding(q, at, TABLE, chunk_size=12, local_size=4)
        batched = [x[None] for x in (*queries, k, v)]
        out = dual_chunk_attention(*batched, chunk_size=12, local_size=4)
        assert isinstance(out, Tensor)
        return out

    g = torch.Generator().manual_seed(0)
    q, k, v = (oracle.draw(g, torch.float32, 20, 2, 8) for _ in range(3))
    at = torch.arange(20)
    compiled = torch.compile(run, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(q, k, v, at), run(q, k, v, at))


X = torch.zeros(1, 5, 2, 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chunk_size": 4}, "chunk_size is 4 and local_size is 4; chunks of chunk_size - local_si"),
        ({"local_size": 0}, "local_size is 0; it must be at least 1"),
        ({"chunk_size": 12.0}, "chunk_size is 12.0; it must be an int"),
        ({"chunk_size": None}, "chunk_size is None; it must be an int"),
        ({"chunk_size": 2**31}, "chunk_size is 2147483648; it must be at least 1 and below"),
        ({"q_succ": None}, "q_succ is None; it must be a tensor"),
        ({"q_succ": X[:, :4]}, r"q_succ has shape \[1, 4, 2, 8\]; expected the shape of q_intra"),
        ({"q_inter": X.double()}, "q_inter is torch.float64 but q_intra is torch.float32"),
        ({"k": X[..., :1, :4]}, "q_intra has dim 8 and k has dim 4"),
        ({"softcap": -1.0}, "softcap is -1.0; it must be 0, which turns it off"),
        (
            {"kernel": "cuda"},
            "kernel='cuda' does not exist; choose 'auto' or one of 'gluon', 'triton'",
        ),
    ],
)
def test_refusals(change: dict[str, object], message: str) -> None:
    arguments = {"q_intra": X, "q_succ": X, "q_inter": X, "k": X, "v": X}
    arguments |= {"chunk_size": 12, "local_size": 4}
    with pytest.raises(ValueError, match=message):
        dual_chunk_attention(**(arguments | change))


def test_gradients_are_refused() -> None:
    q = X.clone().requires_grad_()
    with pytest.raises(NotImplementedError, match="q_intra requires .*; call under torch.no_grad"):
        dual_chunk_attention(q, q, q, X, X, chunk_size=12, local_size=4)


def test_a_short_table_is_refused() -> None:
    with pytest.raises(ValueError, match=r"cos_sin has shape \[12, 2, 4\].*at least 13 positions"):
        dual_chunk_rotary_embedding(X[0], torch.arange(5), TABLE[:12], chunk_size=12, local_size=4)
    with pytest.raises(ValueError, match="positions holds -1; it must be at least 0"):
        dual_chunk_rotary_embedding(X[0], torch.arange(5) - 1, TABLE, chunk_size=12, local_size=4)
    with pytest.raises(ValueError, match="positions is None; it must be a tensor"):
        dual_chunk_rotary_embedding(X[0], None, TABLE, chunk_size=12, local_size=4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="original_max_position is 1.5; it must be an int"):
        dual_chunk_rotary_embedding(
            *(X[0], torch.arange(5), TABLE),
            chunk_size=12,
            local_size=4,
            original_max_position=1.5,  # type: ignore[arg-type]
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((4, 4), "chunk_size is 4 and local_size is 4"),
        ((4.0, 1), "chunk_size is 4.0; it must be a whole number"),
        ((2**31, 1), "chunk_size is 2147483648; it must be a whole number.*below 2[*][*]31"),
        ((4, 1, 2**70), "original_max_position is 1180591620717411303424; it must be a whole"),
        ((4, 1, 0), "original_max_position is 0; it must be a whole number of at least 1"),
        ((4, 1, 8, "all"), "length_factor is 'all'; choose one of 'query', 'prompt'"),
    ],
)
def test_configurations_that_make_no_sense(options: tuple[object, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DualChunkConfig(*options)  # type: ignore[arg-type]


def test_a_field_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="has a field twice"):
        DualChunkConfig.of("chunk_size=4,local_size=1,local_size=2")


def test_a_table_has_no_more_rows_than_are_looked_up() -> None:
    for chunk_size, local_size in ((12, 4), (12, 10), (2, 1), (40, 1)):
        config = DualChunkConfig(chunk_size, local_size)
        query, key, _ = positions_of(chunk_size, local_size, 4 * config.chunk_len)
        assert config.num_positions == 1 + max(int(query.max()), int(key.max()))


def test_paged_batches_are_checked() -> None:
    g = torch.Generator().manual_seed(0)
    paged = fill(g, [(2, 9)], (2, 1), (8, 8), 4, torch.float32)
    batch = PagedBatch(**{**vars(paged.batch), "max_kv_len": 8})
    with pytest.raises(ValueError, match="paged_dual_chunk_attention: kv_lens holds 9 but max_kv"):
        paged_dual_chunk_attention(
            *(paged.q, paged.q, paged.q, paged.k_pages, paged.v_pages, batch),
            chunk_size=12,
            local_size=4,
        )
    narrow = [x.to(torch.float8_e4m3fn) for x in (paged.k_pages, paged.v_pages)]
    with pytest.raises(ValueError, match="k_pages is torch.float8_e4m3fn but q_intra is torch.fl"):
        paged_dual_chunk_attention(
            *(paged.q, paged.q, paged.q, *narrow, paged.batch), chunk_size=12, local_size=4
        )
