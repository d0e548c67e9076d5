"""`rooftile compile`: kernels built ahead of their first call, on a machine with or without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def compile_kernels(
    operator: Annotated[str, typer.Argument(metavar="OPERATOR", help="attention")],
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", metavar="DIR", help="The cache to fill; carry it as TRITON_CACHE_DIR."
        ),
    ],
    target: Annotated[str, typer.Option(help="sm_90a, sm_80, sm_89 or sm_100a.")] = "sm_90a",
    cases: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="Groups (forward, short, varlen) or cases such as 'b4 s4096 h32/8 d128 causal', "
            "separated by commas. Kernels differ by head dim, mask, and class of length only.",
        ),
    ] = "forward,short,varlen",
    kernels: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            show_default="gluon and triton for sm_90a, triton for others",
            help="Kernel families, separated by commas.",
        ),
    ] = "",
    dtype: Annotated[str, typer.Option(help="bf16 or fp16.")] = "bf16",
) -> None:
    """Compile the kernels of an operator into a directory; needs Triton, no GPU.

    Triton recognises the files where the same build of it runs under the same Python version:
    set TRITON_CACHE_DIR there to the carried directory.
    """
    if dtype not in ("bf16", "fp16"):
        raise ValueError(f"dtype is {dtype!r}; choose bf16 or fp16")

    import torch

    from rooftile.bench.ops.registry import SUITES, suite_of
    from rooftile.bench.results import check_directory
    from rooftile.cli.tables import text_console
    from rooftile.kernels.offline import offline, target_of

    if operator not in (known := [name for name, suite in SUITES.items() if suite.build]):
        raise ValueError(
            f"the kernels of {operator!r} cannot be built ahead; choose from {', '.join(known)}"
        )
    suite, kind = suite_of(operator), {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    assert suite.build is not None
    hopper = target_of(target).capability == (9, 0)
    families = [name.strip() for name in kernels.split(",") if name.strip()]
    families = families or [name for name in suite.families if name != "gluon" or hopper]
    for family in families:
        if family not in suite.families:
            raise ValueError(
                f"{operator} has no compiled kernel {family!r}; choose from "
                f"{', '.join(suite.families)}"
            )
        if family == "gluon" and not hopper:
            raise ValueError(f"the gluon kernels are for sm_90a, not {target}; choose triton")
    names = [name.strip() for name in cases.split(",") if name.strip()]
    if not names:
        raise ValueError(f"cases is {cases!r}; name a group or a case")
    check_directory(output)
    console = text_console()
    compiled = found = 0
    seconds = 0.0
    with offline(target, output.resolve()) as built:
        for family in families:
            for _, case in suite.cases(names):
                before = len(built)
                try:
                    with console.status(f"{family}: {case}"):
                        suite.build(case, kind, family)
                except NotImplementedError as error:
                    if kernels:
                        raise
                    console.print(str(error), style="yellow", markup=False)
                for one in built[before:]:
                    found += one.found
                    compiled += not one.found
                    seconds += 0.0 if one.found else one.seconds
                    if not one.found:
                        console.print(f"{one.seconds:5.1f} s  {family} {one.kernel}: {case}")
    console.print(f"{compiled} kernels compiled in {seconds:.0f} s, {found} found in {output}")
