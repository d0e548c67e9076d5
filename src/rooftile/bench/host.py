"""What this machine is and which versions run on it: for `doctor` and for every recorded result."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from rooftile.engine.memory import free_memory_bytes

# Name shown -> flags of /proc/cpuinfo, all of which it takes.
CPU_FEATURES = {
    "avx2": ("avx2", "fma"),
    "avx512": ("avx512f", "avx512bw", "avx512dq", "avx512vl"),
    "avx512_bf16": ("avx512_bf16",),
    "avx512_vnni": ("avx512_vnni",),
    "amx": ("amx_tile", "amx_bf16", "amx_int8"),
}
PACKAGES = (
    "rooftile", "torch", "triton", "transformers", "numpy", "safetensors", "gguf", "tokenizers",
    "jinja2", "huggingface_hub",
)  # fmt: skip


@dataclass(frozen=True)
class Gpu:
    name: str
    capability: str  # such as "9.0"
    memory: int  # bytes


@dataclass(frozen=True)
class Host:
    processor: str
    cores: int  # that this process may use
    features: dict[str, bool]
    memory_total: int  # bytes
    memory_free: int  # bytes
    gpus: tuple[Gpu, ...]

    @property
    def slug(self) -> str:
        """A directory name for results measured here."""
        name = self.gpus[0].name if self.gpus else f"{self.processor} {self.cores} cores"
        return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def host() -> Host:
    info = _read("/proc/cpuinfo")
    flags = set(_field(info, "flags").split())
    return Host(
        processor=_field(info, "model name") or platform.processor() or platform.machine(),
        cores=len(os.sched_getaffinity(0)),
        features={name: flags.issuperset(needed) for name, needed in CPU_FEATURES.items()},
        memory_total=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        memory_free=free_memory_bytes(),
        gpus=_gpus(),
    )


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that matter and are installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """The commit of the source tree that this package runs from, `None` outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _gpus() -> tuple[Gpu, ...]:
    import torch

    if not torch.cuda.is_available():
        return ()
    properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return tuple(Gpu(p.name, f"{p.major}.{p.minor}", p.total_memory) for p in properties)


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _field(text: str, name: str) -> str:
    match = re.search(rf"^{name}\s*:\s*(.*)$", text, re.MULTILINE)
    return match[1].strip() if match else ""
