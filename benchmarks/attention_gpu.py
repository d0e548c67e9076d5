"""Checks and times variants of the Hopper attention kernel on a GPU, cuDNN and FA2 beside them.

    python benchmarks/attention_gpu.py --out DIR [--variants default,all] [--sections fwd,short,varlen]

First every variant is checked on small, odd shapes against float64; then each is measured as
`rooftile bench ops attention` does, with the same cases, peers and rows. That command is what a user
runs; this script is for choosing between configurations of a kernel.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "src"))

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from rooftile.bench.host import host
from rooftile.bench.ops.attention import SUITE as ATTENTION_SUITE
from rooftile.bench.ops.attention import inputs
from rooftile.bench.ops.run import measure
from rooftile.bench.results import append
from rooftile.kernels.gluon import attention as gluon
from rooftile.kernels.reference import attention as reference
from rooftile.kernels.triton import attention as portable
from rooftile.planning.attention_case import attention_case
from rooftile.planning.hardware import MACHINES

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


def time_group(suite: str, cases, select, out: str) -> None:  # type: ignore[no-untyped-def]
    """Variants beside the peers, one line a case and a row in DIR/<machine>/SUITE.jsonl."""
    machine, device = host(), torch.device("cuda")
    known = MACHINES.get(machine.slug)
    for name in cases:
        case = attention_case(name)
        peers = ["cudnn", "fa2"] if suite == "attention" else ["cudnn"]
        families = ["gluon"] + (["triton"] if {"triton", "all"} & set(select) else [])
        problem = ATTENTION_SUITE.make(name, device, torch.bfloat16, families, peers)
        runs = dict(problem.kernels)
        if not case.ragged:
            q, k, v, _ = inputs(case, device, torch.bfloat16)
            args = (q, k, v, None, -1, 0 if case.causal else -1, 0.0, case.k_dim**-0.5)
            for label, config in VARIANTS[case.k_dim].items():
                if config is not None and (label in select or "all" in select):
                    runs[f"gluon {label}"] = lambda c=config, a=args: gluon.attention(*a, config=c)
        elif len(set(case.q_lens)) == 1:
            dense = attention_case(case.name.removesuffix(" varlen"))
            (run,) = ATTENTION_SUITE.make(
                dense.name, device, torch.bfloat16, ["gluon"], []
            ).kernels.values()
            # The same random numbers, laid out alike; the check expects tokens in one dimension.
            runs["gluon dense"] = lambda r=run: r().flatten(0, 1)
        measured = measure(suite, replace(problem, kernels=runs), device, machine=known)
        for row in measured.rows:
            append(row, machine, Path(out))
        cells = [f"{row.kernel} {row.tflops:.0f} ({row.us:.0f})" for row in measured.rows]
        cells += [
            f"{peer} {problem.work.flops / timing.us / 1e6:.0f} ({timing.us:.0f})"
            for peer, (timing, _) in measured.peers.items()
        ]
        cells += [f"no {peer}: {reason}" for peer, reason in measured.absent.items()]
        print(" | ".join([f"{case.name:32s}", *cells]), flush=True)


def call_overhead() -> None:
    q = torch.randn(1, 128, 1, 128, device="cuda", dtype=torch.bfloat16)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        x = q.transpose(1, 2)
        bare = torch.nn.functional.scaled_dot_product_attention
        for name, fn in (
            ("gluon", lambda: gluon.attention(q, q, q, None, -1, -1, 0.0, 0.1)),
            ("gluon causal", lambda: gluon.attention(q, q, q, None, -1, 0, 0.0, 0.1)),
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
    groups = (("fwd", "attention", "forward"), ("short", "attention_short", "short"),
              ("varlen", "attention_varlen", "varlen"))  # fmt: skip
    for section, suite, group in groups:
        if section in sections:
            time_group(suite, ATTENTION_SUITE.groups[group], select, options.out)
    if "overhead" in sections:
        call_overhead()


if __name__ == "__main__":
    main()
