"""Times the plan that is chosen for a product, and the most promising others, beside the library.

python benchmarks/gemm_plans_gpu.py compile 0/8 [--cases aligned,forward] [--plans 4]  # a part of all, into Triton's cache
python benchmarks/gemm_plans_gpu.py time RUN ROWS.jsonl [--cases ...] [--plans ...]    # appends rows

On a Hopper GPU. A kernel takes seconds to compile, so parts (0/8 to 7/8) are compiled by as many processes;
each plan is compared with float64 there and again before it is timed. Rows are as
rooftile/bench/ops/gemm_plans.py says; benchmarks/gemm_costs.py fits costs to them. A fit has to know
what it would choose: one that chose plans nobody had timed lost 2% (docs/performance.md).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from rooftile.bench.ops.gemm import GROUPS
from rooftile.bench.ops.gemm_plans import ITEMSIZE, Record, name_of
from rooftile.bench.ops.timing import time_in_turn
from rooftile.kernels.gluon.gemm.forward import matmul
from rooftile.kernels.gluon.gemm.plan import Plan, choose_plan, config_of, plan_of
from rooftile.kernels.gluon.launch import multiprocessors
from rooftile.planning.hardware import H200
from rooftile.planning.stream_k import Decomposition, Product
from rooftile.planning.stream_k_choice import (
    FEW_ROWS,
    candidates,
    may_be_transposed,
    tilings_for,
)
from rooftile.planning.stream_k_cost import is_apart, is_passing, predict

SLOWER = 1.1  # than the most promising: what is not timed
CHECKED_ROWS = 64
DTYPE = torch.bfloat16


def records(cases: str) -> Iterator[Record]:
    """Of the products of these groups that take no copies, more than few rows each."""
    for group in cases.split(","):
        for case in GROUPS[group]:
            record = Record(0, case, 0.0, {})
            if record.aligned and record.product.m > FEW_ROWS:
                yield record


def decompositions(product: Product, units: int) -> Iterator[Decomposition]:
    """All that the planner may choose from (stream_k_choice.py)."""
    turned = Product(product.n, product.m, product.k)
    for tiling in tilings_for(product, ITEMSIZE, True, units):
        yield from candidates(product, units, [tiling])
    if min(product.m, product.n) > FEW_ROWS and product.m != product.n:
        for tiling in tilings_for(turned, ITEMSIZE, True, units):
            if may_be_transposed(tiling):
                found = candidates(turned, units, [tiling])
                yield from (plan for plan in found if not is_apart(plan))


def promising(record: Record, units: int, most: int) -> dict[str, Plan]:
    """The plan that is chosen, first, and others that are predicted to take little longer, by their names."""
    product, rows = record.product, record.rows
    machine = replace(H200, units=units)
    timed = []
    for found in decompositions(product, units):
        turned = found.product != product
        seconds = predict(found, machine, ITEMSIZE, rows, True, turned)
        config = config_of(found.tiling, ITEMSIZE).by_itself
        if config.can_pass and is_passing(found, ITEMSIZE, rows):
            config = config.passing_on
        plan = replace(plan_of(config, found, seconds), transposed=turned)
        timed.append((seconds, name_of(found, turned, config.passing), plan))
    timed.sort(key=lambda one: one[0])
    size = (product.m, product.n, product.k)
    chosen = choose_plan(*size, ITEMSIZE, units, False, rows, True, True)
    plans = {name: plan for _, name, plan in timed if _alike(plan, chosen)}
    for seconds, name, plan in timed:
        if len(plans) < most and seconds < SLOWER * timed[0][0]:
            plans.setdefault(name, plan)
    return plans


def _alike(plan: Plan, other: Plan) -> bool:
    """Plans are compared by identity elsewhere."""
    return all(
        getattr(plan, name) == getattr(other, name)
        for name in ("config", "transposed", "num_ctas", "group_ctas", "stream_tiles", "apart")
    )


def operands(product: Product, device: torch.device) -> tuple[Tensor, Tensor]:
    """a [m, k] and b [k, n], whose columns are contiguous."""
    generator = torch.Generator(device).manual_seed(0)
    a, weight = (
        torch.randn(rows, product.k, generator=generator, device=device).to(DTYPE)
        for rows in (product.m, product.n)
    )
    return a, weight.T


def run(a: Tensor, b: Tensor, plan: Plan) -> Tensor:
    return matmul(a, b, None, None, None, None, "none", DTYPE, False, plan)


def check(a: Tensor, b: Tensor, plan: Plan, what: str) -> None:
    """Raises RuntimeError where some of the rows are not those of float64."""
    out = run(a, b, plan)
    rows = torch.arange(0, a.shape[0], max(a.shape[0] // CHECKED_ROWS, 1), device=a.device)
    exact = a[rows].double() @ b.double()
    allowed = 4 * torch.finfo(DTYPE).eps * exact.abs().amax(-1, keepdim=True)
    if not bool(((out[rows].double() - exact).abs() <= allowed).all()):
        raise RuntimeError(f"{what} is wrong")


def compile_part(part: int, parts: int, cases: str, most: int) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    todo = []
    for record in records(cases):
        for name, plan in promising(record, multiprocessors(device), most).items():
            kernel = (plan.config, plan.transposed, plan.apart, plan.stream_tiles > 0)
            todo.append((str(kernel), name, plan, record))
    kernels = sorted({kernel for kernel, *_ in todo})[part::parts]
    for kernel, name, plan, record in todo:
        if kernel in kernels:
            check(*operands(record.product, device), plan, f"{record.case} as {name}")


def measure(number: int, file: Path, cases: str, most: int) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    with file.open("a") as rows:
        for record in records(cases):
            a, b = operands(record.product, device)
            plans = promising(record, multiprocessors(device), most)
            runs = {"library": partial(torch.mm, a, b)}
            for name, plan in plans.items():
                check(a, b, plan, f"{record.case} as {name}")
                runs[name] = partial(run, a, b, plan)
            there = time_in_turn(runs, device, seconds=0.02, most_rounds=11)
            back = time_in_turn(dict(reversed(runs.items())), device, seconds=0.02, most_rounds=11)
            us = {name: round((there[name].us * back[name].us) ** 0.5, 2) for name in runs}
            row = {"run": number, "case": record.case, "vendor": us.pop("library"), "plans": us}
            rows.write(json.dumps(row) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("compile", "time"))
    parser.add_argument("number", help="I/N of the parts to compile, or of the run")
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--cases", default="aligned,forward", help="groups of products")
    parser.add_argument("--plans", type=int, default=4, help="of a product, at most")
    options = parser.parse_args()
    if options.what == "compile":
        part, parts = map(int, options.number.split("/"))
        compile_part(part, parts, options.cases, options.plans)
    elif options.file is None:
        parser.error("time: to which file?")
    else:
        measure(int(options.number), options.file, options.cases, options.plans)


if __name__ == "__main__":
    main()
