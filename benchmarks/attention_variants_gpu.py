"""Dual chunk and differential attention on a GPU: checked, then timed beside our plain attention.

python benchmarks/attention_variants_gpu.py OUT.jsonl      # a minute on an H200

Each case runs its contenders in turn, so that clocks and temperature are the same for all; ratios
are of medians.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from rooftile.ops.attention import ATTENTION
from rooftile.ops.differential import DIFFERENTIAL, PAGED_DIFFERENTIAL
from rooftile.ops.dual_chunk import DUAL_CHUNK, PAGED_DUAL_CHUNK
from rooftile.ops.dual_chunk_rotary import DUAL_CHUNK_ROTARY
from rooftile.ops.paged import PAGED_ATTENTION
from rooftile.ops.rope import ROTARY_EMBEDDING
from rooftile.ops.rotary_table import RotaryConfig, rotary_table

DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
FLUSHED = 256 << 20


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.float32).to(DTYPE)


def time_all(contenders: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Microseconds of each run, contenders in turn, the L2 cache flushed before each."""
    scratch = torch.empty(FLUSHED, dtype=torch.int8, device=DEVICE)
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for run in contenders.values():
        run()
    torch.cuda.synchronize()
    for _ in range(repeats):
        events = {}
        for name, run in contenders.items():
            scratch.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            events[name] = (begin, end)
        torch.cuda.synchronize()
        for name, (begin, end) in events.items():
            found[name].append(begin.elapsed_time(end) * 1000)
    return found


def graphed(run: Callable[[], Any]) -> Callable[[], Any]:
    """As the engine runs it: captured once, replayed."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def error(got: Tensor, expected: Tensor) -> float:
    difference = got.double() - expected.double()
    return float(difference.norm() / expected.double().norm())


def record(case: str, contenders: dict[str, Callable[[], Any]], repeats: int, **more: Any) -> None:
    times = time_all(contenders, repeats)
    row = {
        "case": case,
        "us": {name: round(median(t), 1) for name, t in times.items()},
        "us_p20": {name: round(sorted(t)[len(t) // 5], 1) for name, t in times.items()},
        "us_p80": {name: round(sorted(t)[-1 - len(t) // 5], 1) for name, t in times.items()},
        "gpu": torch.cuda.get_device_name(),
        **more,
    }
    with Path(sys.argv[1]).open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    print(case, row["us"], more, flush=True)


def plain(q: Tensor, k: Tensor, v: Tensor, kernel: str = "auto", scale: float = 0.0) -> Tensor:
    scale = scale or q.shape[-1] ** -0.5
    return ATTENTION.handle(q, k, v, None, -1, 0, 0.0, scale, kernel)[0]


def check_dual_chunk() -> None:
    for length, chunk in ((1500, 300), (5000, 2048), (257, 1000), (6000, 2100)):
        queries = [randn(1, length, 8, 128) for _ in range(3)]
        k, v = randn(1, length, 2, 128), randn(1, length, 2, 128)
        exact = DUAL_CHUNK.handle(
            *(x.double() for x in (*queries, k, v)), chunk, 0.0, 0.09, "reference"
        )
        for kernel in ("triton", "gluon"):
            if kernel == "gluon" and chunk < 2048:
                continue
            got = DUAL_CHUNK.handle(*queries, k, v, chunk, 0.0, 0.09, kernel)
            found = error(got[0], exact[0]), float((got[1] - exact[1]).abs().max())
            print("dual chunk", length, chunk, kernel, found, flush=True)
            assert found[0] < 5e-3
            assert found[1] < 1e-3


def dual_chunk(length: int, chunk: int, repeats: int) -> None:
    queries = [randn(1, length, 32, 128) for _ in range(3)]
    k, v = randn(1, length, 8, 128), randn(1, length, 8, 128)
    contenders = {
        "plain gluon": lambda: plain(queries[0], k, v, "gluon"),
        "plain triton": lambda: plain(queries[0], k, v, "triton"),
    }
    for kernel in ("gluon", "triton"):
        contenders[f"dual chunk {kernel}"] = lambda kernel=kernel: DUAL_CHUNK.handle(
            *queries, k, v, chunk, 0.0, 128**-0.5, kernel
        )
    record(f"b1 s{length} h32/8 d128 chunks of {chunk}", contenders, repeats)


def pool(
    lengths: list[int], heads: int, dims: tuple[int, int], page_size: int
) -> tuple[Tensor, ...]:
    """k_pages, v_pages, cu_seqlens_q, kv_lens, page_table of requests with one query each."""
    counts = [-(-n // page_size) for n in lengths]
    pages = torch.randperm(sum(counts), device=DEVICE).int()
    table = torch.zeros(len(lengths), max(counts), dtype=torch.int32, device=DEVICE)
    start = 0
    for i, count in enumerate(counts):
        table[i, :count] = pages[start : start + count]
        start += count
    k, v = (randn(sum(counts), heads, page_size, dim) for dim in dims)
    cu = torch.arange(len(lengths) + 1, dtype=torch.int32, device=DEVICE)
    return k, v, cu, torch.tensor(lengths, dtype=torch.int32, device=DEVICE), table


def paged_plain(q: Tensor, paged: tuple[Tensor, ...], kernel: str) -> Any:
    k, v, cu, lens, table = paged
    longest = table.shape[1] * k.shape[2]
    return PAGED_ATTENTION.handle(
        *(q, k, v, cu, lens, table, 1, longest, None, -1, 0, 0.0, 64**-0.5),
        *(None, None, False, None, [], kernel),
    )


def paged_dual_chunk(lengths: list[int], chunk: int, repeats: int) -> None:
    queries = [randn(len(lengths), 32, 128) for _ in range(3)]
    paged = pool(lengths, 8, (128, 128), 16)
    k, v, cu, lens, table = paged
    longest = table.shape[1] * 16

    def run(kernel: str) -> Any:
        return PAGED_DUAL_CHUNK.handle(
            *(*queries, k, v, cu, lens, table, 1, longest, chunk, 0.0, 64**-0.5, kernel)
        )

    exact = run("reference")
    found = {}
    for kernel in ("triton", "gluon"):
        got = run(kernel)
        found[kernel] = error(got[0], exact[0]), float((got[1] - exact[1]).abs().max())
    assert max(found.values())[0] < 8e-3, found
    contenders = {
        "plain triton": graphed(lambda: paged_plain(queries[0], paged, "triton")),
        "dual chunk triton": graphed(lambda: run("triton")),
        "dual chunk gluon": graphed(lambda: run("gluon")),
    }
    call = PAGED_ATTENTION.call(
        *(queries[0], k, v, cu, lens, table, 1, longest, None, -1, 0, 0.0, 64**-0.5),
        *(None, None, False, None, []),
    )
    if PAGED_ATTENTION.choose(call) == "gluon":
        contenders["plain gluon"] = graphed(lambda: paged_plain(queries[0], paged, "gluon"))
    case = f"b{len(lengths)} {max(lengths)} h32/8 d128 page16 chunks of {chunk}"
    record(case, contenders, repeats, error=found)


def differential(length: int, dim: int, pairs: tuple[int, int], repeats: int) -> None:
    q = randn(1, length, pairs[0], 2, dim)
    k, v = randn(1, length, pairs[1], 2, dim), randn(1, length, pairs[1], 2 * dim)
    q1, q2 = q[..., 0, :], q[..., 1, :]
    k1, k2 = k[..., 0, :], k[..., 1, :]
    lam = torch.rand(pairs[0], device=DEVICE)
    scale = dim**-0.5

    def run(kernel: str) -> Any:
        return DIFFERENTIAL.handle(q1, k1, q2, k2, v, lam, -1, 0, scale, kernel)

    # Checked on the first tokens; the reference makes all scores.
    cut = [x[:, :1500].double() for x in (q1, k1, q2, k2, v)]
    exact = DIFFERENTIAL.handle(*cut, lam, -1, 0, scale, "reference")[0]
    errors = {name: error(run(name)[0][:, :1500], exact) for name in ("triton", "gluon")}
    assert max(errors.values()) < 8e-3, errors
    dense = [x.contiguous() for x in (q1, k1, q2, k2)]
    halves = [x.contiguous() for x in v.chunk(2, -1)]

    def two(kernel: str) -> Any:
        out1 = plain(dense[0], dense[1], v, kernel, scale)
        return out1 - lam[:, None] * plain(dense[2], dense[3], v, kernel, scale)

    def four(kernel: str) -> Any:
        out1 = torch.cat([plain(dense[0], dense[1], x, kernel, scale) for x in halves], -1)
        out2 = torch.cat([plain(dense[2], dense[3], x, kernel, scale) for x in halves], -1)
        return out1 - lam[:, None] * out2

    contenders = {
        f"{name} {kernel}": (lambda f=f, kernel=kernel: f(kernel))
        for name, f in (("two calls", two), ("four calls", four), ("differential", run))
        for kernel in ("gluon", "triton")
    }
    case = f"b1 s{length} pairs {pairs[0]}/{pairs[1]} d{dim} causal"
    record(case, contenders, repeats, error=errors)


def paged_differential(lengths: list[int], dim: int, pairs: tuple[int, int], repeats: int) -> None:
    q1, q2 = randn(len(lengths), pairs[0], dim), randn(len(lengths), pairs[0], dim)
    paged = pool(lengths, pairs[1], (2 * dim, 2 * dim), 16)
    k, v, cu, lens, table = paged
    k1, k2 = k[..., :dim].contiguous(), k[..., dim:].contiguous()
    v1, v2 = v[..., :dim].contiguous(), v[..., dim:].contiguous()
    lam = torch.rand(pairs[0], device=DEVICE)
    longest = table.shape[1] * 16

    def run(kernel: str) -> Any:
        return PAGED_DIFFERENTIAL.handle(
            *(q1, q2, k, v, lam, cu, lens, table, 1, longest, -1, 0, 64**-0.5, kernel)
        )

    exact, got = run("reference"), run("triton")
    found = error(got[0], exact[0])
    assert found < 8e-3, found

    def attend(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return paged_plain(q, (keys, values, cu, lens, table), "auto")[0]

    def two() -> Any:
        return attend(q1, k1, v) - lam[:, None] * attend(q2, k2, v)

    def four() -> Any:
        out1 = torch.cat([attend(q1, k1, x) for x in (v1, v2)], -1)
        return out1 - lam[:, None] * torch.cat([attend(q2, k2, x) for x in (v1, v2)], -1)

    contenders = {
        "two calls": graphed(two),
        "four calls": graphed(four),
        "differential": graphed(lambda: run("auto")),
    }
    case = f"b{len(lengths)} {max(lengths)} pairs {pairs[0]}/{pairs[1]} d{dim} page16"
    record(case, contenders, repeats, error=found)


def rotary() -> None:
    q, at = randn(8192, 32, 128), torch.arange(8192, device=DEVICE)
    table = rotary_table(RotaryConfig(128), 8193, device=DEVICE)
    got = DUAL_CHUNK_ROTARY.handle(q, at, None, table, False, 8192, 1024, 4096, "triton")
    exact = DUAL_CHUNK_ROTARY.handle(
        q.double(), at, None, table, False, 8192, 1024, 4096, "reference"
    )
    found = max(error(a, b) for a, b in zip(got, exact, strict=True))
    assert found < 4e-3, found
    contenders = {
        "rotary_embedding": lambda: ROTARY_EMBEDDING.handle(q, at, table, False, False, "auto"),
        "three queries": lambda: DUAL_CHUNK_ROTARY.handle(
            q, at, None, table, False, 8192, 1024, 4096, "triton"
        ),
    }
    record("8192 tokens h32 d128 rotated", contenders, 10, error=found)


def main() -> None:
    torch.manual_seed(0)
    cases: list[Callable[[], None]] = [
        check_dual_chunk,
        lambda: dual_chunk(65536, 12288, 4),
        lambda: dual_chunk(65536, 253952, 4),
        lambda: dual_chunk(65536, 5120, 4),
        lambda: paged_dual_chunk([65536], 12288, 20),
        lambda: paged_dual_chunk([32768] * 8, 12288, 10),
        lambda: paged_dual_chunk([4096] * 32, 1024, 10),
        lambda: differential(16384, 64, (16, 4), 6),
        lambda: paged_differential([4096] * 32, 64, (16, 4), 10),
        lambda: paged_differential([65536], 64, (16, 4), 20),
        rotary,
        lambda: differential(16384, 128, (16, 4), 6),
        lambda: paged_differential([4096] * 32, 128, (16, 4), 10),
    ]
    for case in cases:  # one that fails does not stop the others
        try:
            case()
        except Exception:
            traceback.print_exc()


if __name__ == "__main__":
    main()
