"""The saw teeth of whole tiles and the line of Stream-K: throughput against the number of tiles.

python benchmarks/gemm_waves.py measure ROWS.jsonl   # on a Hopper GPU
python benchmarks/gemm_waves.py draw ROWS.jsonl FILE # of such rows

A row: tiles of 128x128 of a product [128 tiles, 4096] @ [4096, 128], bf16, weights stored [n, k], and
microseconds of the vendor's library, of whole tiles and of Stream-K (hybrid of two tiles), replayed
as CUDA graphs after a write of more than the L2 cache holds, in turn.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

N, K, BLOCK = 128, 4096, 128
TILES = sorted({*range(12, 408, 12), 66, 131, 132, 133, 140, 198, 263, 264, 265, 272, 396, 397})


def measure(file: Path) -> None:
    import torch

    from rooftile.bench.ops.timing import time_in_turn
    from rooftile.kernels.gluon.gemm.config import SQUARE
    from rooftile.kernels.gluon.gemm.forward import matmul
    from rooftile.kernels.gluon.gemm.plan import plan_of
    from rooftile.kernels.gluon.launch import multiprocessors
    from rooftile.planning.stream_k import Product, data_parallel, hybrid

    device = torch.device("cuda", torch.cuda.current_device())
    sms, tiling = multiprocessors(device), SQUARE.tiling(2)
    b = torch.randn(N, K, device=device).bfloat16().T
    with file.open("w") as rows:
        for tiles in TILES:
            a = torch.randn(BLOCK * tiles, K, device=device).bfloat16()
            product = Product(BLOCK * tiles, N, K)
            runs = {"cuBLAS": lambda a=a: torch.mm(a, b)}
            for name, scheme in (("data-parallel", data_parallel), ("stream-k", hybrid)):
                plan = plan_of(SQUARE, scheme(product, tiling, sms))
                rest = (None, None, None, None, "none", torch.bfloat16, False, plan)
                runs[name] = lambda a=a, rest=rest: matmul(a, b, *rest)
                assert torch.allclose(runs[name]().float(), (a @ b).float(), rtol=0.02, atol=2)
            times = time_in_turn(runs, device, seconds=0.02, most_rounds=9)
            found = {name: round(time.us, 2) for name, time in times.items()}
            rows.write(json.dumps({"tiles": tiles, **found}) + "\n")


def draw(file: Path, picture: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [json.loads(line) for line in file.read_text().splitlines()]
    figure, axes = pyplot.subplots(figsize=(9, 4), layout="constrained")
    for name, style in (("cuBLAS", "k:"), ("data-parallel", "C1.-"), ("stream-k", "C0.-")):
        teraflops = [2.0 * BLOCK * row["tiles"] * N * K / row[name] / 1e6 for row in rows]
        axes.plot([row["tiles"] for row in rows], teraflops, style, label=name)
    axes.set_xlabel(f"tiles of {BLOCK}x{BLOCK}, k = {K}; 132 multiprocessors")
    axes.set_ylabel("TFLOP/s, launch included")
    axes.set_ylim(0)
    axes.legend(loc="lower right")
    figure.savefig(picture, dpi=150)


if __name__ == "__main__":
    if sys.argv[1] == "measure":
        measure(Path(sys.argv[2]))
    else:
        draw(Path(sys.argv[2]), Path(sys.argv[3]))
