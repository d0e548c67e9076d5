"""What a model family says about its checkpoints, and the naming that Llama's relatives share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rooftile.models.config import DecoderConfig
from rooftile.models.families.fields import Fields
from rooftile.models.gguf import GGUFFile

# our name -> theirs, as `places` reads it.
HF_NAMES = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "layers.{i}.attention_norm": "model.layers.{i}.input_layernorm",
    "layers.{i}.mlp_norm": "model.layers.{i}.post_attention_layernorm",
    "layers.{i}.q": "model.layers.{i}.self_attn.q_proj",
    "layers.{i}.k": "model.layers.{i}.self_attn.k_proj",
    "layers.{i}.v": "model.layers.{i}.self_attn.v_proj",
    "layers.{i}.o": "model.layers.{i}.self_attn.o_proj",
    "layers.{i}.q_norm": "model.layers.{i}.self_attn.q_norm",
    "layers.{i}.k_norm": "model.layers.{i}.self_attn.k_norm",
    "layers.{i}.gate": "model.layers.{i}.mlp.gate_proj",
    "layers.{i}.up": "model.layers.{i}.mlp.up_proj",
    "layers.{i}.down": "model.layers.{i}.mlp.down_proj",
    "layers.{i}.router": "model.layers.{i}.mlp.gate",
    "layers.{i}.experts.{e}.gate": "model.layers.{i}.mlp.experts.{e}.gate_proj",
    "layers.{i}.experts.{e}.up": "model.layers.{i}.mlp.experts.{e}.up_proj",
    "layers.{i}.experts.{e}.down": "model.layers.{i}.mlp.experts.{e}.down_proj",
}
GGUF_NAMES = {
    "embedding": "token_embd",
    "norm": "output_norm",
    "head": "output",
    "layers.{i}.attention_norm": "blk.{i}.attn_norm",
    "layers.{i}.attention_post_norm": "blk.{i}.post_attention_norm",
    "layers.{i}.mlp_norm": "blk.{i}.ffn_norm",
    "layers.{i}.mlp_post_norm": "blk.{i}.post_ffw_norm",
    "layers.{i}.q": "blk.{i}.attn_q",
    "layers.{i}.k": "blk.{i}.attn_k",
    "layers.{i}.v": "blk.{i}.attn_v",
    "layers.{i}.o": "blk.{i}.attn_output",
    "layers.{i}.q_norm": "blk.{i}.attn_q_norm",
    "layers.{i}.k_norm": "blk.{i}.attn_k_norm",
    "layers.{i}.gate": "blk.{i}.ffn_gate",
    "layers.{i}.up": "blk.{i}.ffn_up",
    "layers.{i}.down": "blk.{i}.ffn_down",
    "layers.{i}.router": "blk.{i}.ffn_gate_inp",
    "layers.{i}.experts.{e}.gate": "blk.{i}.ffn_gate_exps",
    "layers.{i}.experts.{e}.up": "blk.{i}.ffn_up_exps",
    "layers.{i}.experts.{e}.down": "blk.{i}.ffn_down_exps",
}
# Norms before and after attention and mlp.
SANDWICH_HF_NAMES = {
    **HF_NAMES,
    "layers.{i}.attention_post_norm": "model.layers.{i}.post_attention_layernorm",
    "layers.{i}.mlp_norm": "model.layers.{i}.pre_feedforward_layernorm",
    "layers.{i}.mlp_post_norm": "model.layers.{i}.post_feedforward_layernorm",
}


@dataclass(frozen=True)
class Family:
    """Models of one `model_type`.

    architectures: the class names that its config.json may give.
    config: the fields of config.json -> what to build.
    gguf_architecture, gguf_config: the same for GGUF; `None` where such files come under the name
        of another family.
    gguf_interleaved: whether llama.cpp's converter reorders the rows of q and k so that rotary
        pairs lie side by side (it does for the architectures "llama" and "granite").
    hf_names, gguf_names: templates, our name -> the checkpoint's (see `places`).
    """

    model_type: str
    architectures: tuple[str, ...]
    config: Callable[[Fields], DecoderConfig]
    gguf_architecture: str | None = None
    gguf_config: Callable[[GGUFFile, Fields], DecoderConfig] | None = None
    gguf_interleaved: bool = False
    hf_names: Mapping[str, str] = field(default_factory=lambda: HF_NAMES)
    gguf_names: Mapping[str, str] = field(default_factory=lambda: GGUF_NAMES)
