"""The model families: one module each, mapping their checkpoints to `DecoderConfig` and our names."""

from __future__ import annotations

from rooftile.models.families.diffllama import DIFFLLAMA
from rooftile.models.families.family import Family
from rooftile.models.families.fields import Fields
from rooftile.models.families.gemma2 import GEMMA2
from rooftile.models.families.gemma3 import GEMMA3
from rooftile.models.families.granite import GRANITE
from rooftile.models.families.llama import LLAMA
from rooftile.models.families.mistral import MISTRAL
from rooftile.models.families.mixtral import MIXTRAL
from rooftile.models.families.olmo2 import OLMO2
from rooftile.models.families.phi3 import PHI3
from rooftile.models.families.qwen2 import QWEN2
from rooftile.models.families.qwen3 import QWEN3
from rooftile.models.families.qwen3_moe import QWEN3_MOE

FAMILIES = (
    LLAMA,
    MISTRAL,
    MIXTRAL,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    GEMMA2,
    GEMMA3,
    PHI3,
    OLMO2,
    GRANITE,
    DIFFLLAMA,
)


def family_of_config(fields: Fields) -> Family:
    """The family that a config.json belongs to, by its architectures, else by its model_type.

    Raises:
        ValueError: none of ours; lists the supported ones.
    """
    names = fields.names("architectures")
    model_type = fields.get("model_type")
    for family in FAMILIES:
        if any(name in family.architectures for name in names):
            return family
        if not names and model_type == family.model_type:
            return family
    given = f"architectures {names}" if names else f"model_type {model_type!r}"
    supported = ", ".join(name for family in FAMILIES for name in family.architectures)
    raise ValueError(f"{fields.where}: {given} is not supported; supported are {supported}")


def family_of_gguf(fields: Fields) -> Family:
    """The family of a GGUF file, by its general.architecture."""
    name = fields.get("general.architecture")
    for family in FAMILIES:
        if family.gguf_config is not None and family.gguf_architecture == name:
            return family
    supported = ", ".join(f.gguf_architecture for f in FAMILIES if f.gguf_architecture)
    raise ValueError(
        f"{fields.where}: general.architecture {name!r} is not supported; supported are {supported}"
    )
