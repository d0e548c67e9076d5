"""A decoder from its configuration and a source of weights: sharded, fused and packed while reading."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from rooftile.distributed.group import ParallelGroup
from rooftile.kernels.cpu.arena import trim
from rooftile.layers.attention import AttentionLayer
from rooftile.layers.differential import DifferentialAttentionLayer, learned_lambda
from rooftile.layers.dual_chunk import DualChunkAttentionLayer
from rooftile.layers.embedding import Embedding, Head, PackedEmbedding
from rooftile.layers.linear import Linear, RowParallelLinear
from rooftile.layers.mlp import GatedMlp
from rooftile.layers.moe import MixtureOfExperts
from rooftile.layers.norm import NoNorm, ProjectionNorm, RMSNorm
from rooftile.models.config import (
    AttentionSpec,
    DecoderConfig,
    DifferentialSpec,
    MlpSpec,
    MoeSpec,
)
from rooftile.models.decoder import Decoder, DecoderLayer
from rooftile.models.packing import Formats, choose_formats, read_packed
from rooftile.models.weights import LAMBDAS, WHOLE, WeightSource, weight_shapes
from rooftile.ops.packed_weight import pack
from rooftile.ops.rotary_table import RotaryConfig, rotary_table
from rooftile.types import PackedWeight

MAX_READERS = 8
# What reading takes besides the weights is given back so often: glibc keeps it for each thread.
LAYERS_BETWEEN_TRIMS = 8


class _Builder:
    def __init__(
        self,
        config: DecoderConfig,
        source: WeightSource,
        dtype: torch.dtype,
        device: torch.device,
        group: ParallelGroup,
        formats: Formats,
    ) -> None:
        self.config = config
        self.source = source
        self.dtype = dtype
        self.device = device
        self.group = group
        self.formats = formats
        self.shapes = weight_shapes(config)
        # Layers of one kind share their table.
        self.tables: dict[tuple[RotaryConfig, int], Tensor] = {
            (rotary, length): rotary_table(rotary, length).to(device)
            for rotary, length in rotary_tables(config)
        }

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def vector(self, name: str) -> Tensor:
        out = self.empty(*self.shapes[name])
        self.source.read(name, out)
        return out

    def norm(self, name: str) -> RMSNorm:
        return RMSNorm(self.vector(name), self.config.norm_eps, self.config.norm_offset)

    def rows(self, parts: Sequence[tuple[str, slice]], has_bias: bool) -> Linear:
        """One matrix out of these rows of several: column-parallel, fused."""
        sizes = [share.stop - share.start for _, share in parts]
        bias = None
        if has_bias:
            bias = self.empty(sum(sizes))
            for (name, share), out in zip(parts, bias.split(sizes), strict=True):
                self.source.read(f"{name}.bias", out, share)
        weight = read_packed(
            self.source, parts, self.config.hidden, self.formats.layers, self.dtype, self.device
        )
        return Linear(weight, bias)

    def columns(self, name: str, share: slice, has_bias: bool) -> RowParallelLinear:
        whole = share == slice(0, self.shapes[name][1])
        weight = read_packed(
            self.source,
            [(name, slice(0, self.config.hidden))],
            share.stop - share.start,
            self.formats.layers,
            self.dtype,
            self.device,
            columns=WHOLE if whole else share,
        )
        bias = self.vector(f"{name}.bias") if has_bias else None
        return RowParallelLinear(weight, bias, self.group)

    def layer(self, index: int) -> DecoderLayer:
        spec, prefix = self.config.layers[index], f"layers.{index}."
        attention = spec.attention
        before = self.norm if spec.pre_norm else lambda name: NoNorm()
        after = self.norm if spec.post_norm else lambda name: None
        return DecoderLayer(
            attention_norm=before(f"{prefix}attention_norm"),
            attention=self.attention(prefix, attention),
            attention_post_norm=after(f"{prefix}attention_post_norm"),
            mlp_norm=before(f"{prefix}mlp_norm"),
            mlp=self.experts(prefix, spec.mlp)
            if isinstance(spec.mlp, MoeSpec)
            else self.mlp(prefix, spec.mlp),
            mlp_post_norm=after(f"{prefix}mlp_post_norm"),
        )

    def attention(self, prefix: str, spec: AttentionSpec) -> AttentionLayer:
        heads, kv_heads = head_shares(spec, self.group)
        q_rows, kv_rows, out_columns = head_rows(spec, heads, kv_heads)
        parts = [(f"{prefix}q", rows) for rows in q_rows]
        parts += [(f"{prefix}{name}", rows) for name in "kv" for rows in kv_rows]
        options: dict[str, Any] = {
            "qkv": self.rows(parts, spec.qkv_bias),
            "out": self.columns(f"{prefix}o", out_columns, spec.out_bias),
            "num_heads": heads.stop - heads.start,
            "num_kv_heads": kv_heads.stop - kv_heads.start,
            "head_dim": spec.head_dim,
            "cos_sin": None
            if spec.rotary is None
            else self.tables[spec.rotary, table_length(spec, self.config)],
            "window": spec.window,
            "softmax_scale": spec.softmax_scale,
            "softcap": spec.softcap,
            "q_norm": self.qk_norm(f"{prefix}q_norm", spec),
            "k_norm": self.qk_norm(f"{prefix}k_norm", spec),
        }
        if spec.dual_chunk is not None:
            return DualChunkAttentionLayer(dual_chunk=spec.dual_chunk, **options)
        if spec.differential is not None:
            own = self.differential(prefix, spec, spec.differential, heads)
            return DifferentialAttentionLayer(**own, **options)
        return AttentionLayer(**options)

    def differential(
        self, prefix: str, spec: AttentionSpec, differential: DifferentialSpec, heads: slice
    ) -> dict[str, Any]:
        """lam and head_norm of a `DifferentialAttentionLayer` with these heads."""
        pairs = slice(heads.start // 2, heads.stop // 2)
        initial = differential.lambda_init
        if initial is None:
            return {"lam": self.rows([(f"{prefix}lambda", pairs)], False), "head_norm": None}
        dim, device = spec.head_dim, self.device
        vectors = [torch.empty(dim, dtype=torch.float32, device=device) for _ in LAMBDAS]
        for name, vector in zip(LAMBDAS, vectors, strict=True):
            self.source.read(f"{prefix}{name}", vector)
        weight = torch.ones(2 * dim, dtype=torch.float32, device=device)
        if differential.norm_weight:
            self.source.read(f"{prefix}head_norm", weight)
        norm = RMSNorm((weight * (1 - initial)).to(self.dtype), self.config.norm_eps)
        q1, k1, q2, k2 = vectors
        lam = learned_lambda(q1, k1, q2, k2, initial)
        return {"lam": lam.repeat(pairs.stop - pairs.start), "head_norm": norm}

    def qk_norm(self, name: str, spec: AttentionSpec) -> RMSNorm | ProjectionNorm | None:
        if spec.qk_norm is None:
            return None
        norm = self.norm(name)
        return ProjectionNorm(norm) if spec.qk_norm == "projection" else norm

    def mlp(self, prefix: str, spec: MlpSpec) -> GatedMlp:
        inner = mlp_share(spec, self.group)
        return GatedMlp(
            self.rows([(f"{prefix}gate", inner), (f"{prefix}up", inner)], spec.bias),
            self.columns(f"{prefix}down", inner, spec.bias),
            spec.activation,
        )

    def experts(self, prefix: str, spec: MoeSpec) -> MixtureOfExperts:
        inner, hidden = mlp_share(spec, self.group), self.config.hidden
        size = inner.stop - inner.start
        gate_up = self.empty(spec.num_experts, 2 * size, hidden)
        down = self.empty(spec.num_experts, hidden, size)
        for expert in range(spec.num_experts):
            name = f"{prefix}experts.{expert}"
            self.source.read(f"{name}.gate", gate_up[expert, :size], inner)
            self.source.read(f"{name}.up", gate_up[expert, size:], inner)
            self.source.read(f"{name}.down", down[expert], WHOLE, inner)
        return MixtureOfExperts(
            self.rows([(f"{prefix}router", slice(0, spec.num_experts))], False),
            gate_up,
            down,
            top_k=spec.top_k,
            activation=spec.activation,
            renormalise=spec.renormalise,
            group=self.group,
        )

    def embedding(self) -> Embedding | PackedEmbedding:
        vocab, scale = self.config.vocab_size, self.config.embedding_scale
        if self.formats.head == "int8_blocks":
            weight = self.vocabulary("embedding", slice(0, vocab), vocab)
            return PackedEmbedding(weight, self.dtype, scale)
        dense = self.empty(vocab, self.config.hidden)
        self.source.read("embedding", dense)
        return Embedding(dense, scale)

    def vocabulary(self, name: str, share: slice, rows: int) -> PackedWeight:
        return read_packed(
            self.source,
            [(name, share)],
            self.config.hidden,
            self.formats.head,
            self.dtype,
            self.device,
            rows=rows,
        )

    def head(self, embedding: Embedding | PackedEmbedding) -> Head:
        vocab, size = self.config.vocab_size, self.group.size
        each = -(-vocab // size)
        share = slice(min(self.group.rank * each, vocab), min((self.group.rank + 1) * each, vocab))
        tied = self.config.tie_embeddings
        if tied and isinstance(embedding, Embedding):
            held = embedding.weight[share]
            short = each - held.shape[0]
            weight = pack(pad(held, (0, 0, 0, short)) if short else held, self.formats.head)
        elif tied and size == 1 and isinstance(embedding, PackedEmbedding):
            weight = embedding.weight
        else:
            weight = self.vocabulary("embedding" if tied else "head", share, each)
        return Head(
            Linear(weight),
            vocab,
            self.group,
            self.config.logits_scale,
            self.config.logits_softcap,
        )


def head_shares(spec: AttentionSpec, group: ParallelGroup) -> tuple[slice, slice]:
    """This rank's query heads and kv heads; ranks share a kv head where there are fewer of them.

    Raises:
        ValueError: the heads do not split evenly; gives the numbers.
        NotImplementedError: norms over all heads, of which each rank has only some.
    """
    if group.size > 1 and spec.qk_norm == "projection":
        raise NotImplementedError(
            f"this model's q and k norms run over all {spec.num_heads} heads together, and each of "
            f"{group.size} processes would hold only some of them; use one process"
        )
    differential = spec.differential
    q_each = 1 if differential is None else 2  # heads that stay together
    kv_each = 1 if differential is None or differential.lambda_init is None else 2
    kind = "heads" if differential is None else "pairs of heads"
    heads = _times(q_each, group.share(f"query {kind}", spec.num_heads // q_each))
    kv_units = spec.num_kv_heads // kv_each
    if group.size % kv_units == 0:
        one = group.rank // (group.size // kv_units)
        return heads, _times(kv_each, slice(one, one + 1))
    return heads, _times(
        kv_each, group.share("kv heads" if kv_each == 1 else "kv pairs of heads", kv_units)
    )


def _times(number: int, share: slice) -> slice:
    return slice(number * share.start, number * share.stop)


def head_rows(
    spec: AttentionSpec, heads: slice, kv_heads: slice
) -> tuple[list[slice], list[slice], slice]:
    """Rows of q, and of k and v, in the checkpoint, in the order that a layer has them; and columns
    of the output matrix. `heads` and `kv_heads` count in the layer's order.
    """
    dim, differential = spec.head_dim, spec.differential
    if differential is None or differential.lambda_init is None:
        columns = _times(dim, heads)
        if differential is not None:
            columns = slice(columns.start // 2, columns.stop // 2)
        return [_times(dim, heads)], [_times(dim, kv_heads)], columns
    if not differential.halves:
        return [_times(dim, heads)], [_times(dim, kv_heads)], _times(dim, heads)

    def adjacent(share: slice, count: int) -> list[slice]:
        places = [head // 2 + head % 2 * (count // 2) for head in range(share.start, share.stop)]
        return [_times(dim, slice(place, place + 1)) for place in places]

    return (
        adjacent(heads, spec.num_heads),
        adjacent(kv_heads, spec.num_kv_heads),
        _times(dim, heads),
    )


def table_length(spec: AttentionSpec, config: DecoderConfig) -> int:
    """Positions that a layer looks up in its rotary table."""
    return config.max_position if spec.dual_chunk is None else spec.dual_chunk.num_positions


def rotary_tables(config: DecoderConfig) -> set[tuple[RotaryConfig, int]]:
    """The rotary tables that a model's layers need, and their lengths."""
    specs = {layer.attention for layer in config.layers}
    return {(s.rotary, table_length(s, config)) for s in specs if s.rotary is not None}


def mlp_share(spec: MlpSpec | MoeSpec, group: ParallelGroup) -> slice:
    """This rank's part of a feed-forward layer's inner columns; ValueError as `head_shares`."""
    return group.share("columns of the feed-forward layer", spec.intermediate)


def build_decoder(
    config: DecoderConfig,
    source: WeightSource,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    group: ParallelGroup | None = None,
    quantization: str = "none",
    on_progress: Callable[[float], None] | None = None,
) -> Decoder:
    """Read this rank's weights from `source` and pack them for `device`.

    on_progress is told the share of the work that is done, 0 to 1.

    Raises:
        ValueError: a quantization that this machine does not have.
    """
    device = torch.device(device)
    formats = choose_formats(quantization, device, dtype)
    builder = _Builder(config, source, dtype, device, group or ParallelGroup(), formats)
    for layer in config.layers:  # refuse before the first byte is read
        head_shares(layer.attention, builder.group)
        mlp_share(layer.mlp, builder.group)
    report = on_progress or (lambda share: None)
    workers = min(MAX_READERS, len(os.sched_getaffinity(0)), len(config.layers))
    layers: list[DecoderLayer] = []
    with ThreadPoolExecutor(workers) as pool:
        first = pool.submit(builder.embedding)
        futures = [pool.submit(builder.layer, index) for index in range(len(config.layers))]
        try:
            embedding = first.result()
            head = builder.head(embedding)
            for future in futures:
                layers.append(future.result())
                report(len(layers) / len(futures))
                if len(layers) % LAYERS_BETWEEN_TRIMS == 0:
                    trim()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    trim()
    return Decoder(config, embedding, layers, builder.norm("norm"), head)
