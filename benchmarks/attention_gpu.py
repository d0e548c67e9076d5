"""Checks and times the Hopper attention kernels on a GPU, cuDNN and FA2 (torch SDPA) beside them.

    python benchmarks/attention_gpu.py --out DIR [--variants default,all] [--sections fwd,short,varlen]

First every variant is checked on small, odd shapes against float64; then each is timed as a CUDA
graph replay with a flushed L2 cache. Rows are JSON lines (docs/performance.md says how to read
them). Depends on torch, Triton and `rooftile.kernels` only.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from dataclasses import replace

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "src"))

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from rooftile.kernels.gluon import attention as gluon
from rooftile.kernels.reference import attention as reference
from rooftile.kernels.triton import attention as portable

C = gluon.CONFIGS
VARIANTS = {
    64: {
        "default": None,
        "192 rows": C[64],
        "192 rows, in turn": replace(C[64], dynamic="never"),
        "128 rows": gluon.SHORT_64,
    },
    128: {
        "default": None,
        "eager": replace(C[128], lazy=False),
        "in turn": replace(C[128], dynamic="never"),
    },
    256: {
        "default": None,
        "eager": replace(C[256], lazy=False),
        "in turn": replace(C[256], dynamic="never"),
    },
}


def worst_ratio(out: torch.Tensor, same: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest row error, in units of twice the same-dtype computation's plus a floor."""
    eps = torch.finfo(out.dtype).eps
    error = (out.double() - exact).abs().amax(-1)
    allowed = 2 * (same.double() - exact).abs().amax(-1) + eps * (exact.abs().amax(-1) + 0.05)
    return (error / allowed).nan_to_num(nan=math.inf).max().item() if error.numel() else 0.0


def check(dim: int, config: gluon.Config | str | None, seed: int, features: dict) -> str:
    """One random case; returns what is wrong, or nothing."""
    g = torch.Generator().manual_seed(seed)
    pick = lambda *options: options[int(torch.randint(len(options), (1,), generator=g))]  # noqa: E731
    dtype = features.get("dtype", torch.bfloat16)
    heads, group = pick(1, 2, 3), pick(1, 2, 4)
    left, right = features.get("left", -1), features.get("right", -1)
    softcap, scale = features.get("softcap", 0.0), dim**-0.5
    sink = torch.randn(heads * group, generator=g).cuda() if features.get("sink") else None
    make = lambda *shape: torch.randn(*shape, generator=g).to(dtype).cuda()  # noqa: E731
    options = (sink, left, right, softcap, scale)
    wide = (None if sink is None else sink.double(), *options[1:])
    torch.empty(1 << 26, device="cuda").fill_(math.nan)  # poison what torch.empty may hand out
    if features.get("ragged"):
        n = pick(1, 5, 40)
        q_lens = [pick(0, 1, 7, 63, 64, 129, 200, 700) for _ in range(n)]
        kv_lens = [pick(0, 1, 5, 64, 127, 128, 300, 1000) for _ in range(n)]
        cu_q = torch.tensor([0, *q_lens]).cumsum(0).cuda()
        cu_k = torch.tensor([0, *kv_lens]).cumsum(0).cuda()
        pad = pick(0, 3, 200)
        q = make(sum(q_lens) + pad, heads * group, dim)
        k, v = (make(sum(kv_lens) + pad + 1, heads, dim) for _ in range(2))
        tensors = (q, k, v, cu_q, cu_k, max(q_lens), max(kv_lens))
        exact = reference.attention_varlen(q.double(), k.double(), v.double(), *tensors[3:], *wide)
        same = reference.attention_varlen(*tensors, *options)
        for x, end in ((q, sum(q_lens)), (k, sum(kv_lens)), (v, sum(kv_lens))):
            x[end:] = math.nan
        if config == "triton":
            got = portable.attention_varlen(*tensors, *options)
        else:
            got = gluon.attention_varlen(*tensors, *options, config=config)
        what = f"ragged q {q_lens} kv {kv_lens} pad {pad}"
    else:
        batch, m, n = pick(1, 2), pick(1, 64, 200, 513, 1100), pick(1, 100, 128, 640, 1500)
        if features.get("packed"):
            qkv = make(batch, n, 3, heads, dim)
            q, k, v = qkv.unbind(2)
        else:
            q = make(batch, m, heads * group, dim)
            k, v = (make(batch, n, heads, dim) for _ in range(2))
        exact = reference.attention(q.double(), k.double(), v.double(), *wide)
        same = reference.attention(q, k, v, *options)
        if config == "triton":
            got = portable.attention(q, k, v, *options)
        else:
            got = gluon.attention(q, k, v, *options, config=config)
        what = f"dense {list(q.shape)} kv {list(k.shape)}"
    torch.cuda.synchronize()
    ratio = worst_ratio(got[0], same[0], exact[0])
    lse_error = (got[1].double() - exact[1]).abs()
    lse_error = lse_error.where(got[1] != exact[1], 0).nan_to_num(nan=math.inf)
    lse_worst = lse_error.max().item() if lse_error.numel() else 0.0
    if ratio > 1 or lse_worst > 2e-3:
        return f"d{dim} {what} heads {heads}x{group} {features}: ratio {ratio:.2f}, lse {lse_worst:.1e}"
    return ""


FEATURES = [
    {},
    {"right": 0},
    {"ragged": True},
    {"ragged": True, "right": 0},
    {"left": 100, "right": 0, "sink": True, "softcap": 20.0},
    {"ragged": True, "left": 37, "right": 5, "sink": True, "dtype": torch.float16},
    {"packed": True, "right": 0, "dtype": torch.float16},
]


def check_worker(part: int, parts: int, everything: bool) -> None:
    jobs = [
        (dim, name, features)
        for features in FEATURES
        for dim, variants in VARIANTS.items()
        for name in variants
        if everything or name == "default" or len(features) < 2 or features.get("ragged")
    ]
    jobs += [(dim, "default", f) for dim in (32, 40, 96, 192) for f in FEATURES[:4]]
    jobs += [(dim, "triton", f) for dim in (64, 80, 128, 256) for f in FEATURES]
    failures = 0
    for dim, name, features in jobs[part::parts]:
        variants = VARIANTS[max(64, 1 << (dim - 1).bit_length())]
        config = "triton" if name == "triton" else variants[name]
        for seed in range(3):
            try:
                problem = check(dim, config, seed, features)
            except Exception as error:
                problem = f"d{dim} {features} {type(error).__name__}: {str(error)[-300:]}"
            if problem:
                failures += 1
                print(f"FAILED [{name}] seed {seed} {problem}", flush=True)
    sys.exit(min(failures, 1))


def time_us(functions) -> dict[str, tuple[float, float, float]]:  # type: ignore[no-untyped-def]
    """Median, 20th and 80th percentile of graph replays with a flushed L2 cache.

    The functions take turns, so that clocks and temperature are the same for all.
    """
    flush = torch.empty(128 << 20, dtype=torch.int8, device="cuda")
    graphs = {}
    for name, fn in functions.items():
        for _ in range(2):
            fn()
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            fn()
    times: dict[str, list[float]] = {name: [] for name in graphs}
    began = time.perf_counter()
    rounds = 0
    while rounds < 6 or (rounds < 40 and time.perf_counter() - began < 0.08 * len(graphs)):
        rounds += 1
        events = []
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()
            start.record()
            graph.replay()
            end.record()
            events.append((name, start, end))
        torch.cuda.synchronize()
        if rounds > 2:  # the first two warm up
            for name, start, end in events:
                times[name].append(start.elapsed_time(end) * 1e3)
    result = {}
    for name, values in times.items():
        values.sort()
        n = len(values)
        result[name] = values[n // 2], values[n // 5], values[n * 4 // 5]
    return result


def sdpa(backend, q, k, v, causal):  # type: ignore[no-untyped-def]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))

    def fn():  # type: ignore[no-untyped-def]
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
            )

    return fn


class Report:
    def __init__(self, path: str) -> None:
        self.file = open(path, "a")  # noqa: SIM115

    def row(
        self, section: str, case: str, kernel: str, us: tuple[float, ...], flops: float
    ) -> None:
        row = {
            "suite": section,
            "case": case,
            "kernel": kernel,
            "us": us[0],
            "us_p20": us[1],
            "us_p80": us[2],
            "tflops": flops / us[0] / 1e6,
            "gpu": torch.cuda.get_device_name(),
        }
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()


def time_case(report: Report, section: str, case: str, functions, flops: float) -> None:  # type: ignore[no-untyped-def]
    results = time_us(functions)
    line = [f"{case:32s}"]
    for name, us in results.items():
        report.row(section, case, name, us, flops)
        line.append(f"{name} {flops / us[0] / 1e6:.0f} ({us[0]:.0f})")
    print(" | ".join(line), flush=True)


def with_section(size, args):  # type: ignore[no-untyped-def]
    """Attention with so many bytes of K and V worked on at a time."""
    before, gluon.SECTION_BYTES = gluon.SECTION_BYTES, ((2**31, size),)
    out = gluon.attention(*args)
    gluon.SECTION_BYTES = before
    return out


def time_dense(report: Report, section: str, cases, select) -> None:  # type: ignore[no-untyped-def]
    for b, s, h, hk, d, causal in cases:
        case = f"b{b} s{s} h{h}/{hk} d{d} {'causal' if causal else 'full'}"
        q = torch.randn(b, s, h, d, device="cuda", dtype=torch.bfloat16)
        k, v = (torch.randn(b, s, hk, d, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        functions = {"cudnn": sdpa(SDPBackend.CUDNN_ATTENTION, q, k, v, causal)}
        if section == "attention":
            functions["fa2"] = sdpa(SDPBackend.FLASH_ATTENTION, q, k, v, causal)
        args = (q, k, v, None, -1, 0 if causal else -1, 0.0, d**-0.5)
        for name, config in VARIANTS[d].items():
            if name in select or "all" in select:
                functions[f"gluon {name}"] = lambda c=config, a=args: gluon.attention(*a, config=c)
        if "triton" in select or "all" in select:
            functions["triton"] = lambda a=args: portable.attention(*a)
        if "sections" in select and causal:
            for label, size in (("one head", 0), ("8 MiB", 8 << 20), ("24 MiB", 24 << 20)):
                functions[f"gluon {label}"] = lambda a=args, n=size: with_section(n, a)
        time_case(report, section, case, functions, 4 * b * h * s * s * d * (0.5 if causal else 1))


def time_varlen(report: Report) -> None:
    g = torch.Generator().manual_seed(0)
    ragged = (torch.exp(torch.rand(64, generator=g) * math.log(512)) * 16).int().tolist()
    cases = (("b4 s4096", [4096] * 4), ("b1 s16384", [16384]), ("b64 s16..8192", ragged))
    for label, lens in cases:
        for d, causal in ((64, False), (64, True), (128, False), (128, True), (256, True)):
            h = 2048 // d
            cu = torch.tensor([0, *lens]).cumsum(0).to(torch.int32).cuda()
            q, k, v = (
                torch.randn(sum(lens), h, d, device="cuda", dtype=torch.bfloat16) for _ in range(3)
            )
            options = (None, -1, 0 if causal else -1, 0.0, d**-0.5)
            args = (q, k, v, cu, cu, max(lens), max(lens), *options)
            functions = {"gluon": lambda a=args: gluon.attention_varlen(*a)}
            if len(set(lens)) == 1:
                dense = (*(x.view(len(lens), lens[0], h, d) for x in (q, k, v)), *options)
                functions["gluon dense"] = lambda a=dense: gluon.attention(*a)
            case = f"{label} h{h}/{h} d{d} {'causal' if causal else 'full'}"
            flops = 4 * h * d * sum(n * n for n in lens) * (0.5 if causal else 1)
            time_case(report, "attention_varlen", case, functions, flops)


def call_overhead() -> None:
    q = torch.randn(1, 128, 1, 128, device="cuda", dtype=torch.bfloat16)
    sdpa_call = sdpa(SDPBackend.CUDNN_ATTENTION, q, q, q, False)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        x = q.transpose(1, 2)
        bare = torch.nn.functional.scaled_dot_product_attention
        for name, fn in (
            ("gluon", lambda: gluon.attention(q, q, q, None, -1, -1, 0.0, 0.1)),
            ("gluon causal", lambda: gluon.attention(q, q, q, None, -1, 0, 0.0, 0.1)),
            ("sdpa with its context", sdpa_call),
            ("sdpa", lambda: bare(x, x, x)),
        ):
            for _ in range(20):
                fn()
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(200):
                fn()
            us = (time.perf_counter() - start) / 200 * 1e6
            torch.cuda.synchronize()
            print(f"call overhead {name}: {us:.0f} us", flush=True)
    import cProfile
    import pstats

    profile = cProfile.Profile()
    profile.enable()
    for _ in range(200):
        gluon.attention(q, q, q, None, -1, -1, 0.0, 0.1)
    profile.disable()
    pstats.Stats(profile).sort_stats("tottime").print_stats(16)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--variants", default="default")
    parser.add_argument("--sections", default="check,fwd,short,varlen,overhead")
    parser.add_argument("--worker", default="")
    options = parser.parse_args()
    select, sections = options.variants.split(","), options.sections.split(",")
    if options.worker:
        part, parts = map(int, options.worker.split("/"))
        check_worker(part, parts, "all" in select)
    if "check" in sections:
        start, parts = time.time(), 14
        command = [sys.executable, __file__, "--out", options.out, "--variants", options.variants]
        workers = [subprocess.Popen([*command, "--worker", f"{i}/{parts}"]) for i in range(parts)]
        bad = sum(w.wait() != 0 for w in workers)
        print(
            f"check: {parts - bad} of {parts} parts good, {time.time() - start:.0f} s", flush=True
        )
    report = Report(os.path.join(options.out, "attention.jsonl"))
    if "fwd" in sections:
        time_dense(
            report,
            "attention",
            [
                (16384 // s, s, 2048 // d, 2048 // d, d, causal)
                for d in (128, 64, 256)
                for causal in (False, True)
                for s in (512, 2048, 8192, 16384)
            ],
            select,
        )
        gqa = [(4, 4096, 32, 8, 128, True), (1, 32768, 32, 8, 128, True)]
        time_dense(report, "attention", gqa, select)
    if "short" in sections:
        cases = [
            (32, s, 16, 16, d, causal)
            for d in (64, 128)
            for causal in (False, True)
            for s in (128, 256, 512, 768)
        ]
        time_dense(report, "attention_short", cases, select)
    if "varlen" in sections:
        time_varlen(report)
    if "overhead" in sections:
        call_overhead()


if __name__ == "__main__":
    main()
