"""Rooftile runs Transformers at the roofline of the machine they are on.

Every name is loaded when it is first used: `import rooftile` alone imports neither torch nor an
engine, and an operator does not bring the engine with it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rooftile.engine.async_llm import AsyncLLM as AsyncLLM
    from rooftile.engine.llm import LLM as LLM
    from rooftile.engine.outputs import RequestOutput as RequestOutput
    from rooftile.engine.params import BeamSearchParams as BeamSearchParams
    from rooftile.engine.params import SamplingParams as SamplingParams
    from rooftile.ops import DualChunkConfig as DualChunkConfig
    from rooftile.ops import RotaryConfig as RotaryConfig
    from rooftile.ops import SampleOutput as SampleOutput
    from rooftile.ops import SamplingTensors as SamplingTensors
    from rooftile.ops import append_kv as append_kv
    from rooftile.ops import attention as attention
    from rooftile.ops import attention_varlen as attention_varlen
    from rooftile.ops import differential_attention as differential_attention
    from rooftile.ops import differential_attention_varlen as differential_attention_varlen
    from rooftile.ops import dual_chunk_attention as dual_chunk_attention
    from rooftile.ops import dual_chunk_attention_varlen as dual_chunk_attention_varlen
    from rooftile.ops import dual_chunk_rotary_embedding as dual_chunk_rotary_embedding
    from rooftile.ops import find_prefixes as find_prefixes
    from rooftile.ops import gelu_and_mul as gelu_and_mul
    from rooftile.ops import grouped_linear as grouped_linear
    from rooftile.ops import linear as linear
    from rooftile.ops import mask_mod as mask_mod
    from rooftile.ops import matmul as matmul
    from rooftile.ops import merge_attention_states as merge_attention_states
    from rooftile.ops import pack as pack
    from rooftile.ops import paged_attention as paged_attention
    from rooftile.ops import paged_differential_attention as paged_differential_attention
    from rooftile.ops import paged_dual_chunk_attention as paged_dual_chunk_attention
    from rooftile.ops import plan_paged_attention as plan_paged_attention
    from rooftile.ops import rms_norm as rms_norm
    from rooftile.ops import rotary_embedding as rotary_embedding
    from rooftile.ops import rotary_table as rotary_table
    from rooftile.ops import sample as sample
    from rooftile.ops import score_mod as score_mod
    from rooftile.ops import silu_and_mul as silu_and_mul
    from rooftile.ops import token_ranks as token_ranks
    from rooftile.ops import top_logprobs as top_logprobs
    from rooftile.ops import tree_attention as tree_attention
    from rooftile.ops import unpack as unpack
    from rooftile.types import AttentionPlan as AttentionPlan
    from rooftile.types import KVSpec as KVSpec
    from rooftile.types import PackedWeight as PackedWeight
    from rooftile.types import PagedBatch as PagedBatch
    from rooftile.types import PrefixGroups as PrefixGroups

    __version__: str

OPERATORS = (
    "append_kv",
    "attention",
    "attention_varlen",
    "differential_attention",
    "differential_attention_varlen",
    "dual_chunk_attention",
    "dual_chunk_attention_varlen",
    "dual_chunk_rotary_embedding",
    "find_prefixes",
    "gelu_and_mul",
    "grouped_linear",
    "linear",
    "matmul",
    "merge_attention_states",
    "pack",
    "paged_attention",
    "plan_paged_attention",
    "paged_differential_attention",
    "paged_dual_chunk_attention",
    "rms_norm",
    "rotary_embedding",
    "rotary_table",
    "sample",
    "silu_and_mul",
    "token_ranks",
    "top_logprobs",
    "tree_attention",
    "unpack",
)
MODULES = {
    **dict.fromkeys(OPERATORS, "rooftile.ops"),
    "AsyncLLM": "rooftile.engine.async_llm",
    "AttentionPlan": "rooftile.types",
    "score_mod": "rooftile.ops",
    "mask_mod": "rooftile.ops",
    "DualChunkConfig": "rooftile.ops",
    "RotaryConfig": "rooftile.ops",
    "SampleOutput": "rooftile.ops",
    "SamplingTensors": "rooftile.ops",
    "KVSpec": "rooftile.types",
    "LLM": "rooftile.engine.llm",
    "PackedWeight": "rooftile.types",
    "PagedBatch": "rooftile.types",
    "PrefixGroups": "rooftile.types",
    "RequestOutput": "rooftile.engine.outputs",
    "BeamSearchParams": "rooftile.engine.params",
    "SamplingParams": "rooftile.engine.params",
}
__all__ = sorted(MODULES)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            value: Any = version("rooftile")
        except PackageNotFoundError:  # a source tree on PYTHONPATH
            value = "0+source"
    elif name in MODULES:
        value = getattr(import_module(MODULES[name]), name)
    else:
        raise AttributeError(f"module 'rooftile' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
