"""Decode attention on a CPU against loops that only read: python benchmarks/attention_cpu.py

32 requests of 2,048 tokens, 9 query and 3 key heads of 64, bfloat16, several layers in turn so that no
cache holds them. Beside our kernel: a read from the first byte to the last, and a read of the same
pages in the same order, eight side by side with the next eight prefetched. All take turns at every
layer, so that what else the machine does meets them alike; a figure is the median, its share of the
sequential read the median of the rounds' shares. Checked before timing.
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from rooftile.kernels.cpu.arena import huge
from rooftile.kernels.cpu.compile import find_compiler
from rooftile.kernels.cpu.library import native
from rooftile.kernels.cpu.paged import native_call
from rooftile.ops.paged import PAGED_ATTENTION, paged_attention, run_planned
from rooftile.types import PagedBatch

BATCH, LENGTH, HEADS, KV_HEADS, DIM, LAYERS = 32, 2048, 9, 3, 64, 8
READERS = r"""
#include <cstdint>
#include <thread>
#include <vector>
#include <immintrin.h>
static void halves(int threads, auto part) {
    std::vector<std::thread> others;
    for (int i = 1; i < threads; ++i) others.emplace_back(part, i);
    part(0);
    for (auto& t : others) t.join();
}
static volatile long long sink;
extern "C" void read_all(const char* p, int64_t bytes, int threads) {
    halves(threads, [=](int i) {
        __m512i a = _mm512_setzero_si512(), b = a;
        int64_t end = bytes / threads / 256 * 256 * (i + 1);
        for (int64_t k = bytes / threads / 256 * 256 * i; k < end; k += 128) {
            a = _mm512_add_epi32(a, _mm512_loadu_si512(p + k));
            b = _mm512_add_epi32(b, _mm512_loadu_si512(p + k + 64));
        }
        sink = _mm512_reduce_add_epi32(_mm512_add_epi32(a, b));
    });
}
extern "C" void read_pages(const char* p, const int32_t* table, int64_t pages, int64_t bytes, int threads) {
    halves(threads, [=](int i) {
        __m512i a = _mm512_setzero_si512();
        int64_t end = pages * (i + 1) / threads;
        for (int64_t k = pages * i / threads; k + 8 <= end; k += 8)
            for (int64_t at = 0; at < bytes; at += 256)
                for (int z = 0; z < 8; ++z) {
                    const char* next = p + table[k + 8 + z < end ? k + 8 + z : k + z] * bytes + at;
                    const char* here = p + table[k + z] * bytes + at;
                    for (int line = 0; line < 256; line += 64) {
                        _mm_prefetch(next + line, _MM_HINT_T1);
                        a = _mm512_add_epi32(a, _mm512_loadu_si512(here + line));
                    }
                }
        sink = _mm512_reduce_add_epi32(a);
    });
}
"""


def readers(directory: str) -> ctypes.CDLL:
    compiler = find_compiler()
    if compiler is None:
        raise SystemExit("this benchmark needs a C++ compiler: install g++ or set CXX")
    source, target = Path(directory) / "read.cpp", Path(directory) / "read.so"
    source.write_text(READERS)
    flags = ["-std=c++20", "-O3", "-march=native", "-shared", "-fPIC", "-pthread"]
    subprocess.run([*compiler, *flags, str(source), "-o", str(target)], check=True)
    library = ctypes.CDLL(str(target))
    pointer, long = ctypes.c_void_p, ctypes.c_int64
    library.read_all.argtypes = [pointer, long, ctypes.c_int]
    library.read_pages.argtypes = [pointer, pointer, long, long, ctypes.c_int]
    return library


def check(out: Tensor, q: Tensor, k_pages: Tensor, v_pages: Tensor, table: Tensor) -> None:
    for i in (0, BATCH - 1):
        k, v = (
            x[table[i].long()].transpose(0, 1).flatten(1, 2).double() for x in (k_pages, v_pages)
        )
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, 0) for x in (k, v))
        weights = torch.softmax(torch.einsum("hd,hkd->hk", q[i].double(), k) * DIM**-0.5, -1)
        expected = torch.einsum("hk,hkd->hd", weights, v)
        error = (out[i].double() - expected).norm() / expected.norm()
        assert error < 0.01, f"request {i} is {error:.3f} away from float64"


def case(library: ctypes.CDLL, page_size: int, shuffled: bool, rounds: int) -> None:
    threads, pages = torch.get_num_threads(), BATCH * LENGTH // page_size
    half = KV_HEADS * page_size * DIM
    pool = huge(LAYERS * pages * half * 4).view(torch.bfloat16).view(LAYERS, pages, 2 * half)
    for layer in pool:
        layer.copy_(torch.randn(layer.shape))
    order = torch.randperm(pages) if shuffled else torch.arange(pages)
    table = order.int().view(BATCH, -1)
    q = torch.randn(BATCH, HEADS, DIM).bfloat16()
    lens = torch.full((BATCH,), LENGTH, dtype=torch.int32)
    batch = PagedBatch(torch.arange(BATCH + 1, dtype=torch.int32), lens, table, 1, LENGTH)
    layers = []
    for layer in pool:
        k, v = (x.unflatten(1, (KV_HEADS, page_size, DIM)) for x in layer.split(half, 1))
        layers.append((k, v))
    check(paged_attention(q, *layers[0], batch, kernel="cpu"), q, *layers[0], table)  # type: ignore[arg-type]

    # As the native step calls it for each layer.
    attend = native().rooftile_attention
    out, lse = torch.empty_like(q), torch.empty(BATCH, HEADS)
    calls = [
        native_call(
            *(q, k, v, batch.cu_seqlens_q, lens, table, None, out, lse),
            *(-1, 0, 0.0, DIM**-0.5),
        )
        for k, v in layers
    ]

    def start(layer: int) -> int:
        return pool[layer].data_ptr()

    runs: dict[str, Callable[[int], object]] = {
        "sequential read": lambda i: library.read_all(start(i), pool[i].nbytes, threads),
        "read of the pages": lambda i: library.read_pages(
            start(i), table.data_ptr(), pages, 4 * half, threads
        ),
        "attention": lambda i: attend(ctypes.byref(calls[i]), threads),
        # As layers call it where there is no native step.
        "attention by operator": lambda i: run_planned(
            q, *layers[i], batch, None, None, -1, 0, 0.0, DIM**-0.5, kernel="cpu"
        ),
    }
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    layer = 0
    for _ in range(rounds):
        for name, run in runs.items():
            began = time.perf_counter()
            run(layer)
            seconds[name].append(time.perf_counter() - began)
            layer = (layer + 1) % LAYERS
    print(
        f"page_size {page_size}, pages {'shuffled' if shuffled else 'in order'}, {threads} threads"
    )
    for name, times in seconds.items():
        shares = [a / b for a, b in zip(seconds["sequential read"], times, strict=True)]
        print(
            f"  {name}: {pool[0].nbytes / median(times) / 1e9:.1f} GB/s, {median(shares):.2f} of sequential"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    assert "cpu" in PAGED_ATTENTION.families
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as directory, torch.inference_mode():
        library = readers(directory)
        for page_size in (16, 32, 64, 128):
            for shuffled in (True, False):
                case(library, page_size, shuffled, options.rounds)


if __name__ == "__main__":
    main()
