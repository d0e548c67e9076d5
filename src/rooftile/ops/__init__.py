"""Operators: functional, differentiable where said, `torch.compile`-able. Needs torch only."""

from rooftile.ops.activation import gelu_and_mul, silu_and_mul
from rooftile.ops.append import append_kv
from rooftile.ops.attention import attention, attention_varlen
from rooftile.ops.differential import (
    differential_attention,
    differential_attention_varlen,
    paged_differential_attention,
)
from rooftile.ops.dual_chunk import (
    dual_chunk_attention,
    dual_chunk_attention_varlen,
    paged_dual_chunk_attention,
)
from rooftile.ops.dual_chunk_rotary import DualChunkConfig, dual_chunk_rotary_embedding
from rooftile.ops.gemm import matmul
from rooftile.ops.grouped_linear import grouped_linear
from rooftile.ops.linear import linear
from rooftile.ops.merge import merge_attention_states
from rooftile.ops.modifiers import mask_mod, score_mod
from rooftile.ops.norm import rms_norm
from rooftile.ops.operator import OPERATORS
from rooftile.ops.packed_weight import FORMATS, best_format, pack, unpack
from rooftile.ops.paged import paged_attention, plan_paged_attention
from rooftile.ops.prefixes import find_prefixes
from rooftile.ops.rope import rotary_embedding
from rooftile.ops.rotary_table import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RotaryConfig,
    YarnScaling,
    rotary_table,
)
from rooftile.ops.sampling import (
    SampleOutput,
    SamplingTensors,
    sample,
    token_ranks,
    top_logprobs,
)
from rooftile.ops.tree import tree_attention

__all__ = [
    "FORMATS",
    "OPERATORS",
    "DualChunkConfig",
    "DynamicScaling",
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
    "RotaryConfig",
    "SampleOutput",
    "SamplingTensors",
    "YarnScaling",
    "append_kv",
    "attention",
    "attention_varlen",
    "best_format",
    "differential_attention",
    "differential_attention_varlen",
    "dual_chunk_attention",
    "dual_chunk_attention_varlen",
    "dual_chunk_rotary_embedding",
    "find_prefixes",
    "gelu_and_mul",
    "grouped_linear",
    "linear",
    "mask_mod",
    "matmul",
    "merge_attention_states",
    "pack",
    "paged_attention",
    "paged_differential_attention",
    "paged_dual_chunk_attention",
    "plan_paged_attention",
    "rms_norm",
    "rotary_embedding",
    "rotary_table",
    "sample",
    "score_mod",
    "silu_and_mul",
    "token_ranks",
    "top_logprobs",
    "tree_attention",
    "unpack",
]
