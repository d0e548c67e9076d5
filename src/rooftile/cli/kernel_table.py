"""Which kernel runs what on this machine, and why the others do not."""

from __future__ import annotations

import pkgutil
from collections.abc import Hashable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

import rooftile.ops
from rooftile.ops.activation import ActivationCall
from rooftile.ops.append import AppendCall
from rooftile.ops.attention import AttentionCall
from rooftile.ops.attention_mods import ModifiedCall
from rooftile.ops.differential import DifferentialCall
from rooftile.ops.dual_chunk import DualChunkCall
from rooftile.ops.dual_chunk_rotary import DualChunkRotaryCall
from rooftile.ops.gemm import MatmulCall
from rooftile.ops.grouped_linear import GroupedLinearCall
from rooftile.ops.linear import LinearCall
from rooftile.ops.merge import MergeCall
from rooftile.ops.norm import NormCall
from rooftile.ops.normed_linear import NormedLinearCall
from rooftile.ops.operator import OPERATORS
from rooftile.ops.prefixes import PrefixCall
from rooftile.ops.qkv import QkvCall
from rooftile.ops.rope import RotaryCall
from rooftile.ops.sampling import SamplingCall
from rooftile.ops.split_kv import SplitCall
from rooftile.ops.step import StepCall


@dataclass(frozen=True)
class KernelRow:
    """reasons: kernel family -> why it cannot take the call, `None` where it can.

    chosen: the family that kernel="auto" takes, `None` where none can.
    """

    operator: str
    call: str
    device: str
    chosen: str | None
    reasons: dict[str, str | None]


def kernel_table(devices: list[str]) -> list[KernelRow]:
    """One row per operator, device and representative call; backward operators are left out."""
    for module in pkgutil.iter_modules(rooftile.ops.__path__):
        import_module(f"rooftile.ops.{module.name}")
    return [
        _row(name, device, label, call)
        for name in sorted(OPERATORS)
        if not name.endswith("_backward")
        for device in devices
        for label, call in example_calls(device).get(name, [("any call", None)])
    ]


# Of weights, those that the device has kernels for.
CPU_FORMATS = ("dense", "onednn", "int8", "int4")
GPU_FORMATS = ("dense", "int4_words")


def _row(name: str, device: str, label: str, call: Hashable | None) -> KernelRow:
    operator = OPERATORS[name]
    reasons: dict[str, str | None] = {}
    for family in operator.families:
        kernel = operator.kernel(family)
        if isinstance(kernel, str):
            reasons[family] = kernel
        else:
            reasons[family] = None if call is None else kernel.supports(call)
    chosen = None
    if call is not None and None in reasons.values():
        chosen = operator.choose(call)
    return KernelRow(name, label, device, chosen, reasons)


def example_calls(device: str) -> dict[str, list[tuple[str, Any]]]:
    """Calls such as an 8-billion-parameter Llama makes, and the variants that kernels differ in."""
    bf16, fp32 = torch.bfloat16, torch.float32

    def attention(page_size: int, **more: Any) -> AttentionCall:
        causal: dict[str, Any] = {
            "left": -1, "right": 0, "has_softcap": False, "has_sink": False
        }  # fmt: skip
        return AttentionCall(
            device, bf16, 32, 8, 128, 128, page_size=page_size, **{**causal, **more}
        )

    def attentions(page_size: int) -> list[tuple[str, Any]]:
        return [
            ("bf16 h32/8 d128 causal", attention(page_size)),
            ("… window 4096", attention(page_size, left=4095)),
            ("… softcap", attention(page_size, has_softcap=True)),
            ("… sink", attention(page_size, has_sink=True)),
        ]

    def differentials(page_size: int) -> list[tuple[str, Any]]:
        return [
            (
                f"bf16 pairs 16/4 d64 v128{label}",
                DifferentialCall(
                    *(device, bf16, 16, 4, 64, 128, -1, 0),
                    shared_keys=shared,
                    page_size=page_size,
                ),
            )
            for label, shared in (("", False), (", shared keys", True))
        ]

    def dual_chunks(page_size: int) -> list[tuple[str, Any]]:
        return [
            (
                "bf16 h32/8 d128 chunks of 253952",
                DualChunkCall(device, bf16, 32, 8, 128, 128, 253952, False, page_size),
            )
        ]

    return {
        "attention": attentions(0),
        "attention_varlen": attentions(0),
        **{
            name: [("bf16 h32/8 d128 causal", ModifiedCall(attention(0), "", ""))]
            for name in ("attention_mods", "attention_varlen_mods")
        },
        "attention_alibi": attentions(0),
        "attention_varlen_alibi": attentions(0),
        "paged_attention": attentions(16),
        "tree_attention": attentions(16)[:1],
        "differential_attention": differentials(0),
        "differential_attention_varlen": differentials(0),
        "paged_differential_attention": differentials(16),
        "dual_chunk_attention": dual_chunks(0),
        "dual_chunk_attention_varlen": dual_chunks(0),
        "paged_dual_chunk_attention": dual_chunks(16),
        "dual_chunk_rotary": [("bf16 d128", DualChunkRotaryCall(device, bf16, 128, 128, False))],
        "append_kv": [
            ("bf16 h8 d128 page16 rotary", AppendCall(device, bf16, 8, 128, 128, 16, 128, False))
        ],
        "split_kv": [("any", SplitCall(device))],
        "find_prefixes": [("any", PrefixCall(device))],
        "merge_attention_states": [("bf16 d128", MergeCall(device, bf16, 128))],
        "linear": [
            *(
                (f"bf16 {format}", LinearCall(device, bf16, format))
                for format in (CPU_FORMATS if device == "cpu" else GPU_FORMATS)
            ),
            ("fp32 dense", LinearCall(device, fp32, "dense")),
        ],
        "matmul": [
            ("bf16 512x4096x14336", _matmul(device, bf16, "none")),
            ("… silu_and_mul", _matmul(device, bf16, "silu_and_mul")),
        ],
        "grouped_linear": [("bf16", GroupedLinearCall(device, bf16))],
        "rms_norm": [
            ("bf16 with residual", NormCall(device, bf16, 4096, True, True, False)),
            ("… weight offset", NormCall(device, bf16, 4096, True, True, True)),
        ],
        "rotary_embedding": [("bf16 d128", RotaryCall(device, bf16, 128, 128, False))],
        "gated_activation": [("bf16 silu", ActivationCall(device, bf16, "silu"))],
        "normed_linear": [("bf16 gate silu", NormedLinearCall(device, bf16, "silu"))],
        "norm_rotate_append": [("bf16 d128 norms rotary", QkvCall(device, bf16, 128, 128, True))],
        "prepare_step": [("any", StepCall(device))],
        **{
            name: [("any", SamplingCall(device))]
            for name in ("sample", "top_logprobs", "token_ranks")
        },
    }


def _matmul(device: str, dtype: torch.dtype, activation: str) -> MatmulCall:
    return MatmulCall(
        *(device, dtype, dtype, 512, 4096, 14336, "row", "column"),
        *(activation, False, False, False),
    )
