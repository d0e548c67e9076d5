"""The suite of differential attention. Its peers are compositions over our own plain attention.

Of a case, heads are pairs, and the head dim is that of one key: values have twice as many. The peer `two`
calls attention once for each softmax, `four` once for each softmax and half of the values. Plans are
made beforehand: a step makes one for all its layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rooftile.bench.ops.kinds import case_of, checker, gathered, keys_of, softmax_of
from rooftile.bench.ops.paged import Inputs, inputs
from rooftile.bench.ops.suite import Problem, Run, Suite, check_peers, families_of
from rooftile.ops.attention import attention
from rooftile.ops.differential import (
    DIFFERENTIAL,
    PAGED_DIFFERENTIAL,
    differential_call,
    plan_differential,
)
from rooftile.ops.paged import paged_attention, plan_arguments, plan_paged_attention
from rooftile.planning.decode_case import DecodeCase
from rooftile.planning.roofline import Work, attention_work

PEERS = ("two", "four")
GROUPS: dict[str, tuple[str, ...]] = {
    "forward": ("b1 16k qall h16/4 d64 dense", "b1 16k qall h16/4 d128 dense"),
    "decode": tuple(
        f"{keys} h16/4 d{dim} page16" for dim in (64, 128) for keys in ("b32 4k", "b1 64k")
    ),
    "cpu": ("b1 512 h8/4 d32 page16", "b1 512 qall h8/4 d32 dense"),
}
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def make(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    kernels: Sequence[str] | None,
    peers: Sequence[str],
) -> Problem:
    """`kernels` None: every family that supports the call, the plain reference only on a CPU."""
    case, dense, _ = case_of(name)
    check_peers("differential", peers, PEERS)
    dim = case.k_dim
    both = replace(case, k_dim=2 * dim, v_dim=2 * dim)  # a slot's two keys, and its value
    made = inputs(both, device, dtype)
    lam = torch.rand(case.num_q_heads, generator=torch.Generator().manual_seed(3)).to(device)
    q1, q2 = (x.contiguous() for x in made.q.chunk(2, -1))
    attend: Attend
    if dense:
        shape = (len(case.kv_lens), case.kv_lens[0])
        q1, q2 = q1.unflatten(0, shape), q2.unflatten(0, shape)
        k, v = gathered(made)
        k1, k2 = k.chunk(2, -1)
        call = DIFFERENTIAL.call(q1, k1, q2, k2, v, lam, -1, 0, 1.0)
        families = families_of(DIFFERENTIAL, call, device, kernels)
        runs = {family: _dense(q1, k1, q2, k2, v, lam, family) for family in families}
        attend = _attend
        keys = (k1.contiguous(), k2.contiguous())
    else:
        v = made.v_pages
        call = differential_call(q1, made.k_pages, v, -1, 0)
        families = families_of(PAGED_DIFFERENTIAL, call, device, kernels)
        runs = {family: _paged(q1, q2, made, lam, call, family) for family in families}
        keys = tuple(x.contiguous() for x in made.k_pages.chunk(2, -1))  # type: ignore[assignment]
        attend = _attend_pages(q1, keys[0], made)
    queries, halves = (q1, q2), [x.contiguous() for x in v.chunk(2, -1)]

    def compose(values: Sequence[Tensor]) -> Run:
        def run() -> Tensor:
            first, second = (
                torch.cat([attend(q, k, x) for x in values], -1)
                if len(values) > 1
                else attend(q, k, values[0])
                for q, k in zip(queries, keys, strict=True)
            )
            return first - lam[:, None].to(first.dtype) * second

        return run

    composed = {"two": compose([v]), "four": compose(halves)}
    others = {peer: composed[peer] for peer in peers}
    work = _work(case)
    return Problem(case.name, work, runs, others, {}, _checker(both, made, lam))


SUITE = Suite(
    "differential", GROUPS, gpu=("forward", "decode"), cpu=("cpu",), peers=PEERS, make=make
)


def _dense(
    q1: Tensor, k1: Tensor, q2: Tensor, k2: Tensor, v: Tensor, lam: Tensor, family: str
) -> Run:
    scale = q1.shape[-1] ** -0.5
    return lambda: DIFFERENTIAL.handle(q1, k1, q2, k2, v, lam, -1, 0, scale, family)[0]


def _paged(q1: Tensor, q2: Tensor, made: Inputs, lam: Tensor, call: Any, family: str) -> Run:
    batch, plan = plan_differential(call, made.batch, q1.shape[0], family)
    return lambda: PAGED_DIFFERENTIAL.handle(
        *(q1, q2, made.k_pages, made.v_pages, lam),
        *(batch.cu_seqlens_q, batch.kv_lens, batch.page_table, batch.max_q_len, batch.max_kv_len),
        *(-1, 0, q1.shape[-1] ** -0.5, *plan_arguments(plan), family),
    )[0]


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = attention(q, k, v, causal=True)
    assert isinstance(out, Tensor)
    return out


def _attend_pages(q: Tensor, k_pages: Tensor, made: Inputs) -> Attend:
    """Plans by the width of the values."""
    plans = {
        v.shape[-1]: plan_paged_attention(q, k_pages, v, made.batch)
        for v in (made.v_pages, made.v_pages.chunk(2, -1)[0])
    }

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = paged_attention(q, k, v, made.batch, plan=plans[v.shape[-1]])
        assert isinstance(out, Tensor)
        return out

    return attend


def _work(case: DecodeCase) -> Work:
    """Both softmaxes; every key of a pair and every value once."""
    dim = case.k_dim
    work = attention_work(
        case.q_lens, case.kv_lens, num_q_heads=2 * case.num_q_heads,
        num_kv_heads=case.num_kv_heads, k_dim=dim, v_dim=2 * dim,
    )  # fmt: skip
    numbers = (
        4 * dim * (sum(case.kv_lens) * case.num_kv_heads + sum(case.q_lens) * case.num_q_heads)
    )
    return Work(work.flops, 2.0 * numbers, work.exps)


def _checker(case: DecodeCase, made: Inputs, lam: Tensor) -> Callable[[Any], float]:
    """case: with the dims of a slot."""
    dim = case.k_dim // 2

    def exact(request: int, pair: int, at: Tensor) -> Tensor:
        keys, values = keys_of(made, case, request, pair // case.group_size)
        first = sum(case.q_lens[: request + 1]) - case.kv_lens[request]
        rows = made.q[at + first, pair]
        all_keys = torch.zeros(len(at), keys.shape[0], dtype=torch.long, device=at.device)
        outs = [
            softmax_of([q], all_keys, k, at) @ values
            for q, k in zip(rows.split(dim, -1), keys.split(dim, -1), strict=True)
        ]
        return outs[0] - lam[pair].double() * outs[1]

    return checker(case, case.num_q_heads, made.q.device, exact)
