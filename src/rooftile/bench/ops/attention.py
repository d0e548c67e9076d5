"""The suite of `attention` and `attention_varlen`: cases of the FlashAttention papers, and peers.

Cases are named as `rooftile.planning.attention_case` says. The oracle is float64 on rows drawn from
the case itself, at its full size, the first and last row of a sequence among them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from rooftile.bench.ops.suite import Problem, Run, Suite, WrongResult, check_peers, families_of
from rooftile.ops.attention import (
    ATTENTION,
    ATTENTION_VARLEN,
    attention,
    attention_call,
    attention_varlen,
)
from rooftile.planning.attention_case import AttentionCase, attention_case

PEERS = ("cudnn", "fa2", "flex", "sdpa")
CHECKED_HEADS = 6  # of all sequences, drawn
CHECKED_ROWS = 48  # of each


def _forward_table(dim: int, *lengths: int) -> tuple[str, ...]:
    """16,384 tokens and a hidden size of 2,048, whatever the length and the head dim."""
    heads = 2048 // dim
    return tuple(
        f"b{16384 // s} s{s} h{heads}/{heads} d{dim} {mask}"
        for mask in ("full", "causal")
        for s in lengths
    )


GROUPS: dict[str, tuple[str, ...]] = {
    "forward": (
        *(case for dim in (64, 128, 256) for case in _forward_table(dim, 512, 2048, 8192, 16384)),
        "b4 s4096 h32/8 d128 causal",
        "b1 s32768 h32/8 d128 causal",
    ),
    "short": tuple(
        f"b32 s{s} h16/16 d{dim} {mask}"
        for dim in (64, 128)
        for mask in ("full", "causal")
        for s in (128, 256, 512, 768)
    ),
    "varlen": tuple(
        f"{lengths} h{2048 // dim}/{2048 // dim} d{dim} {mask}{end}"
        for lengths, end in (("b4 s4096", " varlen"), ("b64 s16..8192", ""))
        for dim in (64, 128, 256)
        for mask in ("full", "causal")
    ),
    "cpu": (
        "b1 s512 h9/3 d64 causal",
        "b1 s2048 h9/3 d64 causal",
        "b8 s128 h9/3 d64 causal",
        "b8 s16..256 h9/3 d64 causal",
        "b1 s512 h8/8 d128 full",
    ),
}


def make(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    kernels: Sequence[str] | None,
    peers: Sequence[str],
) -> Problem:
    """`kernels` None: every family that supports the call, the plain reference only on a CPU."""
    case = attention_case(name)
    q, k, v, cu = inputs(case, device, dtype)
    right = 0 if case.causal else -1
    operator = ATTENTION_VARLEN if case.ragged else ATTENTION
    call = attention_call(q, k, v, None, -1, right, 0.0)
    runs = {
        family: _ours(case, q, k, v, cu, family)
        for family in families_of(operator, call, device, kernels)
    }
    others: dict[str, Run] = {}
    absent: dict[str, str] = {}
    for peer in peers:
        found = _peer(peer, case, q, k, v, cu)
        if isinstance(found, str):
            absent[peer] = found
        else:
            others[peer] = found
    return Problem(
        case.name, case.work(q.element_size()), runs, others, absent, _checker(case, q, k, v)
    )


def build(name: str, dtype: torch.dtype, family: str) -> None:
    """The kernels that this case launches; its tensors are never written, so they take no memory.

    Raises:
        NotImplementedError: the family has no kernel for the case.
    """
    case = attention_case(name)

    def empty(lens: tuple[int, ...], heads: int, dim: int) -> Tensor:
        shape = (sum(lens), heads, dim) if case.ragged else (case.batch, lens[0], heads, dim)
        return torch.empty(shape, dtype=dtype)

    q = empty(case.q_lens, case.num_q_heads, case.k_dim)
    k = empty(case.kv_lens, case.num_kv_heads, case.k_dim)
    v = empty(case.kv_lens, case.num_kv_heads, case.v_dim)
    options = (None, -1, 0 if case.causal else -1, 0.0, case.k_dim**-0.5)
    kernels = import_module(f"rooftile.kernels.{family}.attention")
    call = replace(attention_call(q, k, v, *options[:4]), device="cuda")
    reason = kernels.KERNELS["attention_varlen" if case.ragged else "attention"].supports(call)
    if reason is not None:
        raise NotImplementedError(f"{family} has no kernel for {case.name!r}: {reason}")
    if case.ragged:
        cu = [
            torch.tensor([0, *lens]).cumsum(0).to(torch.int32)
            for lens in (case.q_lens, case.kv_lens)
        ]
        longest = (max(case.q_lens), max(case.kv_lens))
        kernels.attention_varlen(q, k, v, *cu, *longest, *options)
    else:
        kernels.attention(q, k, v, *options)


SUITE = Suite(
    "attention", GROUPS, gpu=("forward",), cpu=("cpu",), peers=PEERS, make=make,
    families=("gluon", "triton"), build=build,
)  # fmt: skip


def inputs(
    case: AttentionCase, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor] | None]:
    """q, k, v from N(0, 1), dense or end to end, and the cumulative lengths of the latter."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(lens: tuple[int, ...], heads: int, dim: int) -> Tensor:
        shape = (sum(lens), heads, dim) if case.ragged else (case.batch, lens[0], heads, dim)
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    q = draw(case.q_lens, case.num_q_heads, case.k_dim)
    k = draw(case.kv_lens, case.num_kv_heads, case.k_dim)
    v = draw(case.kv_lens, case.num_kv_heads, case.v_dim)
    if not case.ragged:
        return q, k, v, None
    cu = [
        torch.tensor([0, *lens]).cumsum(0).to(device, torch.int32)
        for lens in (case.q_lens, case.kv_lens)
    ]
    return q, k, v, (cu[0], cu[1])


def _ours(
    case: AttentionCase,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu: tuple[Tensor, Tensor] | None,
    family: str,
) -> Run:
    if cu is None:
        return lambda: attention(q, k, v, causal=case.causal, kernel=family)
    cu_q, cu_k = cu
    longest_q, longest_k = max(case.q_lens), max(case.kv_lens)
    return lambda: attention_varlen(
        q, k, v, cu_q, cu_k, max_q_len=longest_q, max_kv_len=longest_k, causal=case.causal,
        kernel=family,
    )  # fmt: skip


def _peer(
    peer: str,
    case: AttentionCase,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu: tuple[Tensor, Tensor] | None,
) -> Run | str:
    """A call of the peer, or why there is none."""
    check_peers("attention", [peer], PEERS)
    if peer == "sdpa" and q.is_cuda:
        return "on a GPU torch's SDPA is cudnn or fa2"
    if peer != "sdpa" and not q.is_cuda:
        return "it needs an NVIDIA GPU"
    if case.causal and case.q_lens != case.kv_lens:
        return "it aligns a causal mask to the first key, not to the last"
    if cu is None:
        return _flex(case, q, k, v) if peer == "flex" else _sdpa(peer, case, q, k, v)
    if peer == "fa2":
        return _fa2_varlen(case, q, k, v, cu)
    return "torch offers it no sequences laid end to end"


def _sdpa(peer: str, case: AttentionCase, q: Tensor, k: Tensor, v: Tensor) -> Run:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backends = {
        "cudnn": [SDPBackend.CUDNN_ATTENTION],
        "fa2": [SDPBackend.FLASH_ATTENTION],
        "sdpa": [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH],
    }[peer]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = case.num_q_heads != case.num_kv_heads

    def run() -> Tensor:
        with sdpa_kernel(backends):
            out = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=case.causal, enable_gqa=grouped
            )
        return out.transpose(1, 2)

    return run


def _flex(case: AttentionCase, q: Tensor, k: Tensor, v: Tensor) -> Run:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def causal(b: Tensor, h: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return row >= column

    torch.compiler.reset()  # the last case's compiled code would count as a recompilation
    mask = (
        create_block_mask(causal, None, None, case.q_lens[0], case.kv_lens[0], device=q.device)
        if case.causal
        else None
    )
    compiled = torch.compile(flex_attention, dynamic=False)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = case.num_q_heads != case.num_kv_heads
    return lambda: compiled(q, k, v, block_mask=mask, enable_gqa=grouped).transpose(1, 2)


def _fa2_varlen(
    case: AttentionCase, q: Tensor, k: Tensor, v: Tensor, cu: tuple[Tensor, Tensor]
) -> Run | str:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return f"torch {torch.__version__} has no varlen_attn"
    if case.num_q_heads != case.num_kv_heads or case.k_dim != case.v_dim:
        return "varlen_attn takes equal heads and dims"
    options: dict[str, Any] = {}
    if case.causal:  # the name of the option differs between versions of torch
        windowed = "window_size" in inspect.signature(varlen_attn).parameters
        options = {"window_size": (-1, 0)} if windowed else {"is_causal": True}
    cu_q, cu_k = cu
    longest_q, longest_k = max(case.q_lens), max(case.kv_lens)
    return lambda: varlen_attn(q, k, v, cu_q, cu_k, longest_q, longest_k, **options)


def _checker(case: AttentionCase, q: Tensor, k: Tensor, v: Tensor) -> Callable[[Any], float]:
    """Error of an output on drawn rows: norm of the difference over the norm of the oracle."""
    rows = _drawn_rows(case)
    exact = [_oracle(case, q, k, v, *row) for row in rows]

    def check(out: Any) -> float:
        out = out[0] if isinstance(out, tuple) else out
        # In 16 bits the roundings of weights and result dominate, in more the sums of scores.
        unit = torch.finfo(q.dtype).eps * (3 if q.dtype.itemsize == 2 else 16)
        floor = 0.05 if q.dtype.itemsize == 2 else 1.0
        difference = norm = 0.0
        for (sequence, head, positions), expected in zip(rows, exact, strict=True):
            got = _of_sequence(case, out, sequence, case.q_lens)[positions, head].double()
            off = (got - expected).abs()
            allowed = unit * (expected.abs().amax(-1, keepdim=True) + floor)
            if not bool((off <= allowed).all()):
                raise WrongResult(
                    f"{case.name}: sequence {sequence}, head {head} is off by "
                    f"{float(off.nan_to_num(nan=torch.inf).max()):.2g}, allowed "
                    f"{float(allowed.max()):.2g}"
                )
            difference += float((got - expected).square().sum())
            norm += float(expected.square().sum())
        return (difference / max(norm, 1e-300)) ** 0.5

    return check


def _drawn_rows(case: AttentionCase) -> list[tuple[int, int, Tensor]]:
    """Sequence, query head, positions of queries."""
    generator = torch.Generator().manual_seed(1)

    def draw(below: int) -> int:
        return int(torch.randint(below, (1,), generator=generator))

    longest = max(range(case.batch), key=lambda i: case.q_lens[i])
    pairs = [(longest, case.num_q_heads - 1), (case.batch - 1, 0)]
    pairs += [(draw(case.batch), draw(case.num_q_heads)) for _ in range(CHECKED_HEADS - 2)]
    found = []
    for sequence, head in pairs:
        length = case.q_lens[sequence]
        if length:
            drawn = torch.randint(length, (CHECKED_ROWS - 2,), generator=generator)
            found.append((sequence, head, torch.cat([torch.tensor([0, length - 1]), drawn])))
    return found


def _of_sequence(
    case: AttentionCase, x: Tensor, sequence: int, lens: tuple[int, ...]
) -> Tensor:  # [length, heads, dim]
    if not case.ragged:
        return x[sequence]
    start = sum(lens[:sequence])
    return x[start : start + lens[sequence]]


def _oracle(
    case: AttentionCase, q: Tensor, k: Tensor, v: Tensor, sequence: int, head: int, rows: Tensor
) -> Tensor:  # [rows, v_dim] float64
    group = case.num_q_heads // case.num_kv_heads
    rows = rows.to(q.device)
    queries = _of_sequence(case, q, sequence, case.q_lens)[rows, head].double()
    keys = _of_sequence(case, k, sequence, case.kv_lens)[:, head // group].double()
    values = _of_sequence(case, v, sequence, case.kv_lens)[:, head // group].double()
    scores = queries @ keys.T * case.k_dim**-0.5
    if case.causal:
        last = rows + case.kv_lens[sequence] - case.q_lens[sequence]
        columns = torch.arange(keys.shape[0], device=q.device)
        scores = scores.masked_fill(columns > last[:, None], -torch.inf)
    return torch.softmax(scores, -1).nan_to_num(0) @ values
