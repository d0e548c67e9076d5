"""The suites of `paged_attention` and of the plans it follows.

Cases are named as `rooftile.planning.decode_case` says. Pages lie in random order. The peer `read` is a
kernel that only reads as many bytes as the keys and values have: what memory can do in the same run.
The peer `unshared` is our own attention that does not know which requests share a prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rooftile.bench.ops.suite import Problem, Run, Suite, WrongResult, check_peers, families_of
from rooftile.ops.paged import (
    PAGED_ATTENTION,
    paged_attention,
    paged_call,
    plan_paged_attention,
)
from rooftile.ops.split_kv import SPLIT_KV, SplitCall
from rooftile.planning.decode_case import DecodeCase, decode_case
from rooftile.planning.hardware import H200
from rooftile.planning.roofline import Work
from rooftile.planning.split_cost import split_spec
from rooftile.planning.split_kv import Layout, plan
from rooftile.types import AttentionPlan, PagedBatch, PrefixGroups, SplitSpec

PEERS = ("read", "sdpa", "unshared")
CHECKED = 6  # pairs of request and query head
CHECKED_ROWS = 16  # of each

GROUPS: dict[str, tuple[str, ...]] = {
    "forward": (
        "b1 1k h32/8 d128 page16",
        "b1 8k h32/8 d128 page16",
        "b1 64k h32/8 d128 page16",
        "b8 8k h32/8 d128 page16",
        "b32 4k h32/8 d128 page16",
        "b64 2k h32/8 d128 page16",
        "b128 8k h32/8 d128 page16",
        "b256 1k h32/8 d128 page16",
        "b64 loguniform128..32k h32/8 d128 page16",
        "b64 one32k rest512 h32/8 d128 page16",
        "b32 4k h32/32 d128 page16",
        "b32 4k h64/8 d128 page64",
    ),
    "fp8": (
        "b32 4k h32/8 d128 page16 fp8",
        "b128 8k h32/8 d128 page16 fp8",
        "b64 loguniform128..32k h32/8 d128 page16 fp8",
    ),
    "speculative": ("b64 2k q4 h32/8 d128 page16", "b64 2k q8 h32/8 d128 page16"),
    "prefill": tuple(
        f"b{b} {s} qall h32/8 d128 page{page}"
        for b, s in ((8, "2k"), (2, "8k"), (1, "16k"))
        for page in (16, 64)
    ),
    "prefix": ("b64 8448 shared8k h32/8 d128 page16", "b64 1280 shared1k h32/8 d128 page16"),
    "latent": ("b32 4k h16/1 d576/512 page64", "b32 4k h128/1 d576/512 page64"),
    "cpu": ("b1 512 h9/3 d64 page16", "b8 512 h9/3 d64 page16", "b2 256 qall h9/3 d64 page16"),
}


@dataclass(frozen=True)
class Inputs:
    q: Tensor  # [tokens, num_q_heads, k_dim]
    k_pages: Tensor  # [num_pages, num_kv_heads, page_size, k_dim]
    v_pages: Tensor  # [num_pages, num_kv_heads, page_size, v_dim]
    batch: PagedBatch
    options: dict[str, Any]

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, PagedBatch]:
        return self.q, self.k_pages, self.v_pages, self.batch


def inputs(case: DecodeCase, device: torch.device, dtype: torch.dtype) -> Inputs:
    """Queries, keys and values from N(0, 1); pages drawn without order from one pool."""
    generator = torch.Generator(device).manual_seed(0)
    size, heads = case.page_size, case.num_kv_heads
    counts = [-(-kv // size) for kv in case.kv_lens]
    elements = case.k_dim if case.latent else case.k_dim + case.v_dim
    pool = torch.empty(sum(counts), heads * size * elements, device=device, dtype=dtype)
    pool.normal_(generator=generator)
    options: dict[str, Any] = {"window": (case.window, None)} if case.window >= 0 else {}
    if case.fp8:
        pool = pool.to(torch.float8_e4m3fn)
        scales = torch.rand(2, heads, generator=generator, device=device) + 0.5
        options.update(k_scale=scales[0], v_scale=scales[1])
    if case.latent:
        k_pages = pool.unflatten(-1, (heads, size, case.k_dim))
        v_pages = k_pages[..., : case.v_dim]
    else:
        parts = pool.split([heads * size * dim for dim in (case.k_dim, case.v_dim)], -1)
        k_pages = parts[0].unflatten(-1, (heads, size, case.k_dim))
        v_pages = parts[1].unflatten(-1, (heads, size, case.v_dim))
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)).int()
    table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    for row, pages in zip(table, order.split(counts), strict=True):
        row[: len(pages)] = pages
        row[: case.shared // size] = table[0, : case.shared // size]
    prefix = None
    if case.shared:
        first = torch.tensor([0, len(counts)], dtype=torch.int32, device=device)
        lens = torch.tensor([case.shared], dtype=torch.int32, device=device)
        prefix = PrefixGroups(first, lens, case.shared)
    tokens = sum(case.q_lens)
    q = torch.empty(tokens, case.num_q_heads, case.k_dim, device=device, dtype=dtype)
    batch = PagedBatch(
        torch.tensor([0, *case.q_lens]).cumsum(0).to(device, torch.int32),
        torch.tensor(case.kv_lens, dtype=torch.int32, device=device),
        table.to(device),
        max(case.q_lens),
        max(case.kv_lens),
        prefix,
    )
    return Inputs(q.normal_(generator=generator), k_pages, v_pages, batch, options)


def make(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    kernels: Sequence[str] | None,
    peers: Sequence[str],
) -> Problem:
    """`kernels` None: every family that supports the call, the plain reference only on a CPU.

    Plans are made beforehand: a step makes one for all its layers.
    """
    case = decode_case(name)
    made = inputs(case, device, dtype)
    call = paged_call(made.q, made.k_pages, made.v_pages, None, case.window, 0, 0.0)
    runs = {
        family: _ours(made, family)
        for family in families_of(PAGED_ATTENTION, call, device, kernels)
    }
    others: dict[str, Run] = {}
    absent: dict[str, str] = {}
    for peer in peers:
        found = _peer(peer, case, made)
        if isinstance(found, str):
            absent[peer] = found
        else:
            others[peer] = found
    check = _checker(case, made)
    return Problem(case.name, case.work(), runs, others, absent, check)


def _bandwidth(device: torch.device) -> float:
    from rooftile.bench.ops.stream import bandwidth  # which needs Triton

    return bandwidth(device)


SUITE = Suite(
    "paged",
    GROUPS,
    gpu=("forward",),
    cpu=("cpu",),
    peers=PEERS,
    make=make,
    bandwidth=_bandwidth,
    beside=("read",),
)


def _ours(made: Inputs, family: str) -> Run:
    window = {name: made.options[name] for name in ("window",) if name in made.options}
    plan: AttentionPlan = plan_paged_attention(*made.tensors, kernel=family, **window)
    return lambda: paged_attention(*made.tensors, plan=plan, **made.options)


def _peer(peer: str, case: DecodeCase, made: Inputs) -> Run | str:
    """A call of the peer, or why there is none."""
    check_peers("paged", [peer], PEERS)
    if peer == "read":
        if not made.q.is_cuda:
            return "it needs an NVIDIA GPU"
        from rooftile.bench.ops.stream import streaming_read

        read = streaming_read(case.kv_bytes, made.q.device)

        def only_read() -> None:
            read()

        return only_read
    if peer == "unshared":
        if not case.shared:
            return "nothing is shared"
        alone = replace(made, batch=replace(made.batch, prefix=None))
        return _ours(alone, "auto")
    if len(set(case.kv_lens)) > 1 or case.fp8 or case.window >= 0 or case.latent:
        return "it has no ragged, windowed, 8-bit or latent keys"
    if case.q_lens[0] not in (1, case.kv_lens[0]):
        return "it aligns a causal mask to the first key, not to the last"
    return _dense(case, made)


def _dense(case: DecodeCase, made: Inputs) -> Run:
    """torch's own attention over the same keys laid end to end, without pages."""
    pages = made.batch.page_table.long()
    k, v = (
        x[pages].transpose(1, 2).flatten(2, 3)[:, :, : case.kv_lens[0]].contiguous()
        for x in (made.k_pages, made.v_pages)
    )
    q = made.q.unflatten(0, (len(case.q_lens), case.q_lens[0])).transpose(1, 2).contiguous()
    grouped = case.group_size > 1

    def run() -> Tensor:
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=case.q_lens[0] > 1, enable_gqa=grouped
        )
        return out.transpose(1, 2).flatten(0, 1)

    return run


def _checker(case: DecodeCase, made: Inputs) -> Callable[[Any], float]:
    """Error on drawn rows: norm of the difference from float64 over the norm of that."""
    generator = torch.Generator().manual_seed(1)

    def draw(below: int) -> int:
        return int(torch.randint(below, (1,), generator=generator))

    count = len(case.kv_lens)
    longest = max(range(count), key=lambda i: case.kv_lens[i])
    pairs = [(longest, case.num_q_heads - 1), (count - 1, 0)]
    pairs += [(draw(count), draw(case.num_q_heads)) for _ in range(CHECKED - len(pairs))]
    expected = []
    for request, head in pairs:
        q_len = case.q_lens[request]
        rows = torch.randint(q_len, (CHECKED_ROWS,), generator=generator)
        rows[:2] = torch.tensor([0, q_len - 1])
        expected.append((*_oracle(case, made, request, head, rows), head))

    def check(out: Any) -> float:
        if out is None:  # of who only reads
            return 0.0
        difference = norm = 0.0
        for tokens, exact, head in expected:
            got = out[tokens, head].double()
            off = (got - exact).abs()
            # Roundings of weights and result; a 16-bit weight of 8-bit values is no less exact.
            unit = torch.finfo(out.dtype).eps * (3 if out.dtype.itemsize == 2 else 16)
            allowed = unit * (exact.abs().amax(-1, keepdim=True) + 0.05)
            if not bool((off <= allowed).all()):
                raise WrongResult(
                    f"{case.name}: head {head} is off by "
                    f"{float(off.nan_to_num(nan=torch.inf).max()):.2g}, allowed {allowed.max():.2g}"
                )
            difference += float(off.square().sum())
            norm += float(exact.square().sum())
        return float((difference / max(norm, 1e-300)) ** 0.5)

    return check


def _oracle(
    case: DecodeCase, made: Inputs, request: int, head: int, rows: Tensor
) -> tuple[Tensor, Tensor]:
    """Tokens of these rows of a request, and their results [rows, v_dim] in float64."""
    kv_len, kv_head = case.kv_lens[request], head // case.group_size
    pages = made.batch.page_table[request, : -(-kv_len // case.page_size)].long()
    keys, values = (
        x[pages, kv_head].flatten(0, 1)[:kv_len].double() for x in (made.k_pages, made.v_pages)
    )
    if case.fp8:
        keys = keys * made.options["k_scale"][kv_head].double()
        values = values * made.options["v_scale"][kv_head].double()
    tokens = (rows + sum(case.q_lens[:request])).to(made.q.device)
    scores = made.q[tokens, head].double() @ keys.T * case.k_dim**-0.5
    last = (rows + kv_len - case.q_lens[request]).to(made.q.device)[:, None]
    columns = torch.arange(kv_len, device=made.q.device)
    hidden = columns > last
    if case.window >= 0:
        hidden |= columns < last - case.window
    scores = scores.masked_fill(hidden, -torch.inf)
    # A query before the first key sees nothing.
    return tokens, torch.softmax(scores, -1).nan_to_num(0.0) @ values


def make_plan(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    kernels: Sequence[str] | None,
    peers: Sequence[str],
) -> Problem:
    """Making the plan of a case, as the family that would run the case wants it.

    Kernels of a CPU follow no plan; there the plan of an H200 is made, by the specification.
    """
    case = decode_case(name)
    made = inputs(case, device, dtype)
    window = {name: made.options[name] for name in ("window",) if name in made.options}
    split: SplitSpec = plan_paged_attention(*made.tensors, **window).split or split_spec(case, H200)
    batch, prefix = made.batch, made.batch.prefix if split.groups else None
    shared = (None, None) if prefix is None else (prefix.first, prefix.lens)
    on_host = [x.tolist() for x in shared if x is not None]
    expected = plan(split, case.q_lens, case.kv_lens, *on_host).words(split)

    def check(words: Tensor) -> float:
        got, layout = words.tolist(), Layout(split)
        ends = layout.ctas, layout.ctas + 2 * split.num_ctas
        if got[:4] != expected[:4] or got[slice(*ends)] != expected[slice(*ends)]:
            raise WrongResult(f"{case.name}: the plan is not that of planning.split_kv")
        return 0.0

    def run(family: str) -> Run:
        SPLIT_KV.choose(SplitCall(device.type), family)
        lengths = batch.cu_seqlens_q, batch.kv_lens
        return lambda: SPLIT_KV.handle(*lengths, split.numbers, *shared, family)

    if peers:
        raise ValueError("nobody else makes these plans; leave --peers out")
    work = Work(0.0, 4.0 * (4 * len(case.kv_lens) + len(expected)))
    runs = {
        family: run(family)
        for family in families_of(SPLIT_KV, SplitCall(device.type), device, kernels)
    }
    return Problem(case.name, work, runs, {}, {}, check)


PLAN_SUITE = Suite(
    "split_kv",
    {"forward": (*GROUPS["forward"], *GROUPS["prefix"], *GROUPS["prefill"])},
    gpu=("forward",),
    cpu=("forward",),
    peers=(),
    make=make_plan,
)
