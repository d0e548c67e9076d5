"""Compiles the CPU kernels while a wheel is built. Without a compiler the wheel is pure Python.

An editable installation compiles on first use instead, into the user's cache.
"""

from __future__ import annotations

import importlib.util
import shutil
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE = Path("src/rooftile/kernels/cpu")


class CpuKernels(BuildHookInterface):
    PLUGIN_NAME = "custom"
    _made: Path | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        spec = importlib.util.spec_from_file_location(
            "rooftile_compile", Path(self.root) / PACKAGE / "compile.py"
        )
        assert spec is not None
        assert spec.loader is not None
        compile = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(compile)
        compiler = compile.find_compiler()
        if compiler is None:
            self.app.display_warning("no C++ compiler: the CPU kernels are not compiled")
            return
        self._made = Path(tempfile.mkdtemp(prefix="rooftile-"))
        name = compile.library_name()
        try:
            compile.compile_library(self._made / name, compiler)
        except (RuntimeError, OSError) as error:
            self.app.display_warning(f"the CPU kernels are not compiled: {error}")
            return
        build_data["force_include"][str(self._made / name)] = f"rooftile/kernels/cpu/{name}"
        build_data["pure_python"] = False
        system = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{system}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if self._made is not None:
            shutil.rmtree(self._made, ignore_errors=True)
