"""The suite of dual chunk attention. Its peers are our own plain attention over the same keys.

Cases have the word `chunk`, the tokens of one. Plans are made beforehand: a step makes one for all its
layers. The peer `plain` is what `auto` takes, `plain_triton` the portable kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rooftile.bench.ops.kinds import case_of, checker, gathered, keys_of, softmax_of
from rooftile.bench.ops.paged import Inputs, inputs
from rooftile.bench.ops.suite import Problem, Run, Suite, check_peers, families_of
from rooftile.ops.attention import attention
from rooftile.ops.dual_chunk import (
    DUAL_CHUNK,
    PAGED_DUAL_CHUNK,
    DualChunkCall,
    dual_chunk_call,
    plan_dual_chunk,
)
from rooftile.ops.paged import paged_attention, plan_arguments, plan_paged_attention
from rooftile.planning.decode_case import DecodeCase

PEERS = ("plain", "plain_triton")
GROUPS: dict[str, tuple[str, ...]] = {
    "forward": tuple(
        f"b1 64k qall h32/8 d128 dense chunk{chunk}" for chunk in (5120, 12288, 253952)
    ),
    "decode": (
        "b1 64k h32/8 d128 page16 chunk12288",
        "b8 32k h32/8 d128 page16 chunk12288",
        "b32 4k h32/8 d128 page16 chunk1024",
        "b64 loguniform128..32k h32/8 d128 page16 chunk5120",
    ),
    "prefill": (
        "b1 64k qall h32/8 d128 page16 chunk5120",
        "b1 64k q8192 h32/8 d128 page16 chunk12288",
    ),
    "cpu": ("b1 512 h9/3 d64 page16 chunk128", "b1 512 qall h9/3 d64 dense chunk128"),
}


class Plain(NamedTuple):
    """What plain attention of the first rotation returned: it has an oracle of its own."""

    out: Tensor


def make(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    kernels: Sequence[str] | None,
    peers: Sequence[str],
) -> Problem:
    """`kernels` None: every family that supports the call, the plain reference only on a CPU."""
    case, dense, chunk_len = case_of(name, "chunk")
    if chunk_len < 1:
        raise ValueError(f"case {name!r} has no chunks; add a word such as chunk12288")
    check_peers("dual_chunk", peers, PEERS)
    made = inputs(case, device, dtype)
    generator = torch.Generator(device).manual_seed(2)
    queries = torch.empty(3, *made.q.shape, device=device, dtype=dtype).normal_(generator=generator)
    of_peer = {"plain": "auto", "plain_triton": "triton"}
    if dense:
        count = len(case.kv_lens)
        split = queries.unflatten(1, (count, case.kv_lens[0])).unbind(0)
        k, v = gathered(made)
        call = DUAL_CHUNK.call(*split, k, v, chunk_len, 0.0, 1.0)
        families = families_of(DUAL_CHUNK, call, device, kernels)
        runs = {family: _dense(split, k, v, chunk_len, family) for family in families}
        others = {peer: _plain(split[0], k, v, of_peer[peer]) for peer in peers}
    else:
        paged_call = dual_chunk_call(made.q, made.k_pages, made.v_pages, chunk_len, 0.0)
        families = families_of(PAGED_DUAL_CHUNK, paged_call, device, kernels)
        runs = {family: _paged(queries, made, paged_call, family) for family in families}
        others = {peer: _plain_paged(queries[0], made, of_peer[peer]) for peer in peers}
    check = _checker(case, made, queries, chunk_len)
    return Problem(case.name, case.work(), runs, others, {}, check)


SUITE = Suite("dual_chunk", GROUPS, gpu=("forward", "decode"), cpu=("cpu",), peers=PEERS, make=make)


def _dense(queries: tuple[Tensor, ...], k: Tensor, v: Tensor, chunk_len: int, family: str) -> Run:
    scale = k.shape[-1] ** -0.5
    return lambda: DUAL_CHUNK.handle(*queries, k, v, chunk_len, 0.0, scale, family)[0]


def _paged(queries: Tensor, made: Inputs, call: DualChunkCall, family: str) -> Run:
    batch, plan = plan_dual_chunk(call, made.batch, made.q.shape[0], family)
    return lambda: PAGED_DUAL_CHUNK.handle(
        *(*queries, made.k_pages, made.v_pages),
        *(batch.cu_seqlens_q, batch.kv_lens, batch.page_table, batch.max_q_len, batch.max_kv_len),
        *(call.chunk_len, 0.0, made.q.shape[-1] ** -0.5, *plan_arguments(plan), family),
    )[0]


def _plain(q: Tensor, k: Tensor, v: Tensor, kernel: str) -> Run:
    def run() -> Plain:
        out = attention(q, k, v, causal=True, kernel=kernel)
        assert isinstance(out, Tensor)
        return Plain(out)

    return run


def _plain_paged(q: Tensor, made: Inputs, kernel: str) -> Run:
    plan = plan_paged_attention(q, made.k_pages, made.v_pages, made.batch, kernel=kernel)

    def run() -> Plain:
        out = paged_attention(q, made.k_pages, made.v_pages, made.batch, plan=plan)
        assert isinstance(out, Tensor)
        return Plain(out)

    return run


def _checker(
    case: DecodeCase, made: Inputs, queries: Tensor, chunk_len: int
) -> Callable[[Any], float]:
    def exact(request: int, head: int, at: Tensor, plain: bool) -> Tensor:
        keys, values = keys_of(made, case, request, head // case.group_size)
        first = sum(case.q_lens[: request + 1]) - case.kv_lens[request]
        rows = queries[:, at + first, head]
        column = torch.arange(keys.shape[0], device=at.device)
        apart = (at[:, None] // chunk_len - column // chunk_len).clamp(0, 2)
        return softmax_of(rows.unbind(0), apart * 0 if plain else apart, keys, at) @ values

    def of(plain: bool) -> Callable[[Any], float]:
        return checker(case, case.num_q_heads, made.q.device, partial(exact, plain=plain))

    ours, theirs = of(plain=False), of(plain=True)
    return lambda out: theirs(out.out) if isinstance(out, Plain) else ours(out)
