"""Differential attention over pages as one call of the native attention over pages."""

from __future__ import annotations

from rooftile.kernels import Kernel
from rooftile.kernels.cpu.arguments import refusal
from rooftile.kernels.cpu.paged import paged_attention
from rooftile.kernels.torch.differential import over_pages, subtract

KERNELS = {
    "paged_differential_attention": Kernel(
        over_pages(paged_attention, subtract), refusal, efficiency=0.5
    ),
}
