"""Settings of the engine."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rooftile.ops.dual_chunk_rotary import DualChunkConfig

DTYPES = ("auto", "float32", "bfloat16", "float16")
PAGE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
DEVICES = ("auto", "cpu", "cuda")
# By kind of device: tokens a step, share of the free memory, steps in flight.
DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {"max_num_batched_tokens": 2048, "kv_memory_share": 0.3, "pipeline_depth": 1},
    "cuda": {"max_num_batched_tokens": 8192, "kv_memory_share": 0.9, "pipeline_depth": 2},
}
QUANTIZATIONS = ("none", "int8", "int4")


@dataclass(frozen=True)
class EngineConfig:
    """Settings of the engine, checked on construction.

    dtype: of weights and KV; "auto" is bfloat16 where the machine computes fast in it.
    device: "cpu", "cuda" (the current GPU), or "auto": a GPU where there is one.
    page_size: tokens a KV page, a power of two from 1 to 256.
    max_num_batched_tokens: token budget of one step; longer prompts are prefilled in chunks. None:
        2048 on a CPU, 8192 on a GPU.
    max_num_seqs: sequences (requests x n) that run at once.
    max_model_len: longest prompt plus output; None: the model's own limit.
    dual_chunk: dual chunk attention for a model with rotary positions, so that max_model_len may be
        larger than what it was trained for: a `DualChunkConfig`, a mapping of its fields, or text
        such as "chunk_size=6144,local_size=1024,original=8192". With length_factor "prompt" no
        prefixes are shared.
    num_pages: pages of KV memory per KV group, fewer where a sliding window needs no more; None: as
        many as `kv_memory_share` of the memory that is free after loading holds, at most what
        max_num_seqs sequences can use.
    kv_memory_share: None: 0.3 on a CPU, 0.9 on a GPU, where warming up comes before.
    prefix_cache: keep the KV of finished requests for prompts that begin alike.
    quantization: "none", "int8" (a scale for each row of a matrix) or "int4" (a scale and a minimum for
        32 columns of a row) of the weights. Embedding and head keep 8 bits, and with "int4" so do q, k, v
        and down projections that the file does not have in 4-bit blocks. Activations become 8 bits
        within products.
    generation_config: sample as the model's files recommend where a request says nothing: the
        `generation_config.json` of a directory, `general.sampling.*` of a GGUF file.
    random_weights: build the architecture of a config with random weights (for measurements).
    pipeline_depth: steps in flight; 2 schedules a step before the last one's tokens are known. None:
        1 on a CPU, 2 on a GPU.
    cuda_graphs: on a GPU, capture steps by capacity at start-up and replay them.
    """

    model: str | Path
    dtype: str = "auto"
    device: str = "auto"
    quantization: str = "none"
    page_size: int = 16
    max_num_batched_tokens: int | None = None
    max_num_seqs: int = 256
    max_model_len: int | None = None
    dual_chunk: DualChunkConfig | Mapping[str, Any] | str | None = None
    num_pages: int | None = None
    kv_memory_share: float | None = None
    prefix_cache: bool = True
    generation_config: bool = True
    random_weights: bool = False
    seed: int = 0
    pipeline_depth: int | None = None
    cuda_graphs: bool = True

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}; choose one of {', '.join(DTYPES)}")
        if self.quantization not in QUANTIZATIONS:
            raise ValueError(
                f"quantization is {self.quantization!r}; choose one of {', '.join(QUANTIZATIONS)}"
            )
        if self.device not in DEVICES:
            raise ValueError(f"device is {self.device!r}; the engine runs on {', '.join(DEVICES)}")
        for name in ("max_num_batched_tokens", "max_num_seqs", "max_model_len", "num_pages"):
            value = getattr(self, name)
            if value is None and name != "max_num_seqs":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} is {value!r}; it must be a whole number of at least 1")
        if type(self.page_size) is not int or self.page_size not in PAGE_SIZES:
            raise ValueError(
                f"page_size is {self.page_size!r}; choose a power of two from 1 to 256"
            )
        if self.dual_chunk is not None:
            from rooftile.ops.dual_chunk_rotary import DualChunkConfig  # brings torch

            object.__setattr__(self, "dual_chunk", DualChunkConfig.of(self.dual_chunk))
        share = self.kv_memory_share
        if share is not None and (not isinstance(share, int | float) or not 0 < share < 1):
            raise ValueError(f"kv_memory_share is {share!r}; it lies between 0 and 1")
        depth = self.pipeline_depth
        if depth is not None and (type(depth) is not int or depth not in (1, 2)):
            raise ValueError(f"pipeline_depth is {depth!r}; it is 1 or 2")
        if type(self.seed) is not int:
            raise ValueError(f"seed is {self.seed!r}; it must be a whole number")
        for name in ("prefix_cache", "generation_config", "random_weights", "cuda_graphs"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be True or False")

    @property
    def device_type(self) -> str:
        """ "cpu" or "cuda".

        Raises:
            ValueError: "cuda" where torch sees no GPU.
        """
        import torch

        if self.device == "cpu":
            return "cpu"
        if torch.cuda.is_available():
            return "cuda"
        if self.device == "cuda":
            raise ValueError(
                f"device is 'cuda', but torch {torch.__version__} sees no GPU: check nvidia-smi, and "
                f"that torch is a CUDA build; or use device='cpu'"
            )
        return "cpu"

    def resolved(self, device: str) -> EngineConfig:
        """With the defaults of a kind of device, "cpu" or "cuda", where nothing was chosen."""
        chosen = {
            name: default
            for name, default in DEFAULTS[device].items()
            if getattr(self, name) is None
        }
        return replace(self, device=device, **chosen)

    @classmethod
    def build(cls, model: str | Path, **options: Any) -> EngineConfig:
        """Like the constructor, but an unknown option is a ValueError that lists the known ones."""
        known = [field.name for field in fields(cls) if field.name != "model"]
        for name in options:
            if name not in known:
                raise ValueError(
                    f"unknown engine option {name!r}; the options are {', '.join(known)}"
                )
        return cls(model, **options)
