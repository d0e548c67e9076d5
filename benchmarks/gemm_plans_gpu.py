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

from rooftile.bench.ops.gemm import GROUPS, checker, inputs
from rooftile.bench.ops.gemm_plans import ITEMSIZE, Record, name_of
from rooftile.bench.ops.timing import time_in_turn
from rooftile.kernels.gluon.gemm.forward import matmul
from rooftile.kernels.gluon.gemm.plan import Plan, plan_of_choice
from rooftile.kernels.gluon.launch import multiprocessors
from rooftile.planning.hardware import H200, Machine
from rooftile.planning.stream_k import Product
from rooftile.planning.stream_k_choice import (
    FEW_ROWS,
    Choice,
    candidates,
    choose,
    options_for,
)
from rooftile.planning.stream_k_cost import is_apart, predict

SLOWER = 1.1  # than the most promising: what is not timed
DTYPE = torch.bfloat16


def records(cases: str) -> Iterator[Record]:
    """Of the products of these groups that take no copies, more than few rows each."""
    for group in cases.split(","):
        for case in GROUPS[group]:
            record = Record(0, case, 0.0, {})
            if record.aligned and record.product.m > FEW_ROWS:
                yield record


def choices(product: Product, machine: Machine, rows: tuple[int, int]) -> Iterator[Choice]:
    """All that the planner may choose from (stream_k_choice.py)."""
    for what, tiling in options_for(product, machine.units, ITEMSIZE, turnable=True):
        turned = what is not product
        for found in candidates(what, machine.units, [tiling]):
            if not (turned and is_apart(found)):
                yield Choice(found, predict(found, machine, ITEMSIZE, rows, True, turned), turned)


def promising(record: Record, units: int, most: int) -> dict[str, Plan]:
    """The plan that is chosen, first, and others that are predicted to take little longer, by their names."""
    product, rows, machine = record.product, record.rows, replace(H200, units=units)
    chosen = choose(product, machine, ITEMSIZE, None, rows, True, True)
    others = sorted(choices(product, machine, rows), key=lambda choice: choice.seconds)
    plans: dict[str, Plan] = {}
    for choice in (chosen, *others):
        if len(plans) < most and choice.seconds < SLOWER * others[0].seconds:
            plan = plan_of_choice(choice, ITEMSIZE, rows, True)
            name = name_of(choice.decomposition, choice.transposed, plan.config.passing)
            plans.setdefault(name, plan)
    return plans


def run(a: Tensor, b: Tensor, plan: Plan) -> Tensor:
    return matmul(a, b, None, None, None, None, "none", DTYPE, False, plan)


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
            a, b = inputs(record.product, device, DTYPE)
            checker(f"{record.case} as {name}", a, b)(run(a, b, plan))


def measure(number: int, file: Path, cases: str, most: int) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    with file.open("a") as rows:
        for record in records(cases):
            a, b = inputs(record.product, device, DTYPE)
            plans = promising(record, multiprocessors(device), most)
            runs = {"library": partial(torch.mm, a, b)}
            for name, plan in plans.items():
                runs[name] = partial(run, a, b, plan)
                checker(f"{record.case} as {name}", a, b)(runs[name]())
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
