"""`rooftile explain`: what it says for each machine, and where the choice of tile comes from."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rooftile.cli import tiles
from rooftile.cli.main import app
from rooftile.planning.attention_case import attention_case

CASE = "b1 s16384 h16/16 d128 causal"


def explain(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["explain", *arguments], env={"COLUMNS": "100"})
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize(
    ("machine", "said"),
    [
        ("h200", ["kernel gluon: 128 rows by 128 keys", "Binds: matrix", "989 of 989 TFLOP/s"]),
        ("h100", ["H100", "Binds: matrix"]),
        ("b200", ["kernel triton", "Bound by moving data (L2 read)", "256 rows"]),
        ("ascend-910b", ["kernel none", "scores out", "Bound by moving data (L2 write)", "512 keys"]),
        ("cpu", ["kernel torch: 256 rows by 512 keys", "one stream"]),
    ],
)  # fmt: skip
def test_each_machine(machine: str, said: list[str]) -> None:
    output = explain("attention", CASE, "--machine", machine)
    for text in said:
        assert text in output


def test_the_choice_is_the_kernels_own_table() -> None:
    table = tiles._hopper_table()
    for text in ("b32 s256 h16/16 d64 causal", "b1 s16384 h32/32 d64 full", CASE):
        case = attention_case(text)
        config = table.config_of(case.k_dim, case.v_dim, case.q_lens[0], 0 if case.causal else -1)
        chosen = tiles.choice(case, "h200")
        assert (chosen.tile.rows, chosen.tile.block) == (config.tile_rows, config.block)
        usual = table.CONFIGS[config.dim]
        other = (config.tile_rows, config.block) != (usual.tile_rows, usual.block)
        assert ("instead of" in chosen.reason) == other
        assert ("row maximum" in chosen.reason) == config.anchored
    short = table.short_of(128, 128, 100, True, True)
    chosen = tiles.choice(attention_case("b32 s100 h16/16 d128 causal"), "h200")
    assert (chosen.tile.rows, chosen.tile.block) == (short.rows, short.keys)
    assert f"{short.ctas} CTAs" in chosen.reason
    chosen = tiles.choice(attention_case("b8 s2048 h8/8 d192 causal"), "h200")
    assert (chosen.k_dim, chosen.v_dim) == (192, 192)


def test_the_table_is_read_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.startswith(("rooftile.kernels.gluon", "rooftile_h"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)
    assert tiles.choice(attention_case(CASE), "h200").tile.block == 128


def test_another_tile_and_a_drawing(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "timetable.svg"
    output = explain(
        "attention",
        CASE,
        "-m",
        "ascend-910b",
        "--rows",
        "64",
        "--block",
        "512",
        "--plot",
        str(file),
    )
    assert "as asked: 64 rows by 512 keys" in output
    assert "<svg" in file.read_text()


def test_timelines_keep_to_the_terminal_and_tables_are_never_cut() -> None:
    for operator, case in (
        ("attention", CASE),
        ("decode", "b3 1k h8/2 d64"),
        ("gemm", "2176x2176x4096"),
    ):
        for columns in (40, 80):
            arguments = ["explain", operator, case]
            result = CliRunner().invoke(app, arguments, env={"COLUMNS": str(columns)})
            lines = result.output.splitlines()
            drawn = [line for line in lines if line.endswith("|")]
            assert drawn
            assert max(map(len, drawn)) <= columns
            assert "…" not in result.output


def test_a_matrix_product_says_what_its_time_consists_of() -> None:
    whole, cut, broken = (
        explain("gemm", case) for case in ("4096x4096x4096", "128x4096x14336", "904x2280x5036")
    )
    assert "the matrix unit binds a step" in " ".join(whole.split())
    assert "parts" not in whole.split("In microseconds:")[1].split(".\n")[0]
    assert "launch 7." in cut
    assert "parts" in cut.split("In microseconds:")[1].split(".\n")[0]
    assert "reading, which overlaps" in " ".join(broken.split())


def test_nothing_heavy_is_loaded() -> None:
    code = (
        "import sys; from rooftile.cli import tiles; from rooftile.planning import attention_case as a;"
        f"tiles.choice(a.attention_case({CASE!r}), 'h200'); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("operator", ["attention", "decode", "gemm"])
def test_a_plot_that_cannot_be_written_is_refused_at_once(operator: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    case = {"attention": CASE, "decode": "b1 8k h8 d64", "gemm": "9x9x9"}[operator]
    for plot, message in (
        ("x", "must end in one of .png, .svg, .pdf"),
        ("x.gif", "must end in one of"),
        ("nowhere/x.png", "create"),
    ):
        arguments = ["explain", operator, case, "--plot", str(tmp_path / plot)]
        result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
        assert result.exit_code == 1
        assert message in result.output
        assert "|" not in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["attention", "b1 s99999999999999 h1 d64"], "too large"),
        (["attention", "b16777216 s16777216 h1 d64"], "queries in all; at most"),
        (["decode", "b100000 1k h32/8 d128"], "800,000 query tiles"),
        (["decode", "b1 1k q9999999 h1 d64"], "query tiles over all kv heads"),
        (["gemm", "9999999x9999999x1"], "tiles; at most"),
        (["gemm", "1x1x99999999999999999999"], "too large"),
        (["sampling", CASE], "nothing to explain about 'sampling'"),
        (["attention", "b1 s1"], "no 'h' word"),
        (["attention", CASE, "-m", "abacus"], "no machine 'abacus'"),
        (["attention", CASE, "--rows", "17"], "rows is 17"),
        (["attention", "b1 s64 h1 d512", "-m", "h200"], "beyond 256, the largest of the Hopper"),
        (["attention", "b1 s64 h1 d512", "-m", "b200"], "beyond 256, the largest of the portable"),
    ],
)
def test_refusals(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["explain", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 1
    assert message in result.output


def test_few_tiles_are_said_to_be_cut() -> None:
    from rooftile.cli.tiles import choice
    from rooftile.planning.attention_case import attention_case

    few = attention_case("b1 s3584 h5/5 d128 full")
    said = choice(few, "h200").reason
    assert "140 whole tiles would leave CTAs without work" in said
    assert "for 132 CTAs" in said
    for even in (
        "b1 s2048 h8/8 d128 full",
        "b1 s16384 h16/16 d128 causal",
        "b2 s16..4096 h4/4 d64",
    ):
        assert "cut" not in choice(attention_case(even), "h200").reason


@pytest.mark.parametrize("machine", ["cpu", "ascend-910b"])
@pytest.mark.parametrize(
    ("operator", "case"), [("decode", "b3 1k h8/2 d64"), ("gemm", "2176x2176x4096")]
)
def test_plans_of_a_gpu_are_not_told_of_other_machines(
    operator: str, case: str, machine: str
) -> None:
    result = CliRunner().invoke(app, ["explain", operator, case, "-m", machine])
    assert result.exit_code == 1
    assert "choose from h200, h100, b200" in " ".join(result.stderr.split())
