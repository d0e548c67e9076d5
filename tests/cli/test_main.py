"""What holds for the whole command line: light imports, help, usage errors."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from rooftile import __version__ as rooftile_version
from rooftile.cli import loading
from rooftile.cli.options import EngineOptions

Run = Callable[..., Any]


@pytest.mark.parametrize("command", [[], ["generate"], ["chat"], ["doctor"], ["bench", "engine"]])
def test_help_imports_nothing_heavy(command: list[str]) -> None:
    script = (
        "import sys\n"
        "from rooftile.cli.main import app\n"
        "try:\n"
        f"    app([*{command!r}, '--help'])\n"
        "except SystemExit:\n"
        "    pass\n"
        "heavy = {'torch', 'transformers', 'numpy', 'gguf', 'tokenizers', 'jinja2',\n"
        "         'huggingface_hub'}\n"
        "print('heavy:', sorted(heavy & set(sys.modules)))\n"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout
    assert "Usage: " in out
    assert out.endswith("heavy: []\n")


def test_the_module_is_the_command_and_tells_its_version() -> None:
    command = [sys.executable, "-m", "rooftile", "--version"]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.stdout == f"rooftile {rooftile_version}\n"
    assert (ran.returncode, ran.stderr) == (0, "")


COMMANDS = [
    *([], ["generate"], ["chat"], ["serve"], ["demo"], ["doctor"], ["explain"], ["compile"]),
    *(["bench", *rest] for rest in ([], ["engine"], ["ops"], ["sharing"], ["serve"], ["quality"])),
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_fits_80_columns_uncut(rooftile: Run, command: list[str]) -> None:
    shown = rooftile(*command, "--help", COLUMNS="80").stdout
    assert max(map(len, shown.splitlines())) <= 80
    assert "…" not in shown  # what rich writes where it cuts
    assert "<bool>" not in shown  # a switch takes no value
    if "Engine ─" in shown:
        assert "--max-num-batched-tokens" in shown


def test_paragraphs_of_help_wrap_where_the_terminal_ends(rooftile: Run) -> None:
    shown = rooftile("bench", "sharing", "--help", COLUMNS="80").stdout
    lines = [line.strip() for line in shown.splitlines()]
    first = lines.index(next(line for line in lines if line.startswith("Prompts are English")))
    text = lines[first : lines.index("", first)]
    assert all(len(line) > 60 for line in text[:-1])


def test_every_command_is_listed(rooftile: Run) -> None:
    result = rooftile("--help")
    for command in ("generate", "chat", "demo", "doctor", "bench"):
        assert command in result.stdout


@pytest.mark.parametrize(
    "arguments", [["nonsense"], ["generate", "p"], ["generate", "-m", "x", "-n", "many", "p"]]
)
def test_usage_errors_exit_with_2(rooftile: Run, arguments: list[str]) -> None:
    result = rooftile(*arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("model", "more", "said"),
    [
        ("no-such-file.gguf", [], "no such file"),
        ("bench:llama-3.1-8b", [], "add --random-weights"),
        ("bench:nothing", ["--random-weights"], "choose one of bench:llama-3.1-8b, bench:qwen3-"),
        ("demo", ["--page-size", "3"], "page_size is 3"),
    ],
)
def test_a_model_that_cannot_be_loaded_is_one_line(
    rooftile: Run, model: str, more: list[str], said: str
) -> None:
    result = rooftile("generate", "-m", model, *more, "p")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


def test_loading_hands_every_option_to_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    import rooftile.engine.llm
    from rooftile.engine.config import EngineConfig

    seen: dict[str, Any] = {}

    def engine(model: str, **options: Any) -> None:
        options.pop("on_progress")("reading", 0.5)
        seen.update(options, model=model)

    monkeypatch.setattr(rooftile.engine.llm, "LLM", engine)
    options = EngineOptions(
        model="bench:qwen3-0.6b", dtype="float32", device="cpu", page_size=8, max_num_seqs=3,
        max_num_batched_tokens=64, max_model_len=99, num_pages=12, kv_memory_share=0.1,
        dual_chunk="chunk_size=64,local_size=16",
        no_prefix_cache=True, no_generation_config=True, random_weights=True,
    )  # fmt: skip
    loading.load_llm(options, seed=5)
    assert seen["model"].endswith("qwen3-0.6b")
    for name in EngineOptions.__dataclass_fields__:
        if name not in ("model", "no_prefix_cache", "no_generation_config"):
            assert seen[name] == getattr(options, name)
    assert (seen["prefix_cache"], seen["generation_config"]) == (False, False)
    assert seen["seed"] == 5
    EngineConfig(**seen)  # the engine knows every one of them


@pytest.mark.parametrize("module", ["typer", "rooftile.cli.options", "torch"])
def test_ctrl_c_while_importing_ends_quietly(module: str) -> None:
    script = (
        "import sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name == {module!r}:\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "from rooftile.cli.start import main\n"
        "sys.argv = ['rooftile', 'doctor']\n"
        "main()\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "")
