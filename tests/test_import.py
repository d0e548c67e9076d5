"""The package's face: names load when used, and operators need nothing but torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

import rooftile
import rooftile.ops

# The other dependencies of the package (jinja2 and numpy are torch's own as well).
NOT_FOR_OPERATORS = ("safetensors", "gguf", "tokenizers", "huggingface_hub", "typer", "rich")


def run(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_source_tree_that_is_not_installed_has_a_version() -> None:
    run(
        "from importlib import metadata\n"
        "def version(name): raise metadata.PackageNotFoundError(name)\n"
        "metadata.version = version\n"
        "import rooftile\n"
        "assert rooftile.__version__ == '0+source'"
    )


def test_the_package_alone_imports_no_torch() -> None:
    run(
        "import rooftile, sys\n"
        "assert rooftile.__version__\n"
        "assert {'LLM', 'attention', 'sample'} <= set(dir(rooftile))\n"
        "assert {name for name in dir(rooftile) if name[0] != '_'} == set(rooftile.__all__)\n"
        "from rooftile import PackedWeight, KVSpec, PagedBatch\n"
        "assert 'torch' not in sys.modules"
    )


def test_operators_need_torch_only() -> None:
    run(
        "import sys\n"
        f"for name in {NOT_FOR_OPERATORS!r}: sys.modules[name] = None\n"
        "from rooftile import rms_norm\n"
        "import rooftile.ops, torch\n"
        "rooftile.sample(torch.randn(2, 5)), rms_norm(torch.ones(2, 4), None)\n"
        "rooftile.rotary_table\n"
        "assert 'rooftile.engine' not in sys.modules and 'transformers' not in sys.modules"
    )


def test_every_name_loads() -> None:
    for name in rooftile.MODULES:
        assert getattr(rooftile, name).__name__ == name
    for name in rooftile.ops.__all__:
        assert hasattr(rooftile.ops, name)
    with pytest.raises(AttributeError, match="no attribute 'atention'"):
        rooftile.atention  # noqa: B018
