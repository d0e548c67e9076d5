"""What our own quantiser costs, on the demo model with its hidden units shuffled.

The demo's file holds blocks of 4 bits; numbers on such a grid are easy to quantise again. Shuffling
the residual stream, the feed-forward layers' inner units and each head's values changes no result of
the model, but puts into every group of 32 columns numbers from different blocks of the file, which
is what a quantiser meets in a model of 16 bits: python benchmarks/quantiser_quality.py
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import Tensor

from rooftile import LLM
from rooftile.bench.quality import loss, reference_text, windows
from rooftile.models import loader
from rooftile.models.build import build_decoder
from rooftile.models.config import DecoderConfig
from rooftile.models.weights import WHOLE, WeightSource, weight_shapes

TOKENS, WINDOW = 4096, 512


class Shuffled:
    """A source of the same model with its units in another order; it has no blocks to take over."""

    def __init__(self, source: WeightSource, config: DecoderConfig, seed: int = 0) -> None:
        self._source, self._config = source, config
        self._shapes = weight_shapes(config)
        self._generator = torch.Generator().manual_seed(seed)
        self._hidden = self._order(config.hidden)
        self._inner = [self._order(layer.mlp.intermediate) for layer in config.layers]
        self._values = [self._order(layer.attention.head_dim) for layer in config.layers]
        self._last: tuple[str, Tensor] | None = None

    def _order(self, size: int) -> Tensor:
        return torch.randperm(size, generator=self._generator)

    def read(self, name: str, out: Tensor, rows: slice = WHOLE, columns: slice = WHOLE) -> None:
        if self._last is None or self._last[0] != name:
            whole = torch.empty(self._shapes[name])
            self._source.read(name, whole)
            self._last = name, self._shuffle(name, whole)
        whole = self._last[1]
        out.copy_(whole[rows, columns] if whole.dim() == 2 else whole[rows])

    def _shuffle(self, name: str, x: Tensor) -> Tensor:
        if name in ("embedding", "head"):
            return x[:, self._hidden]
        if not name.startswith("layers."):
            return x[self._hidden]
        _, number, kind = name.split(".", 2)
        layer = self._config.layers[int(number)].attention
        inner, values = self._inner[int(number)], self._values[int(number)]
        if kind in ("q", "k", "v", "gate", "up"):
            x = x[:, self._hidden]
            if kind == "v":
                x = x.view(layer.num_kv_heads, layer.head_dim, -1)[:, values].flatten(0, 1)
            return x[inner] if kind in ("gate", "up") else x
        if kind in ("o", "down"):
            x = x[self._hidden]
            if kind == "down":
                return x[:, inner]
            return x.view(-1, layer.num_heads, layer.head_dim)[:, :, values].flatten(1)
        return x[self._hidden]  # norms


def main() -> None:
    def shuffled(config: DecoderConfig, source: WeightSource, **options: Any) -> Any:
        return build_decoder(config, Shuffled(source, config), **options)

    base: float | None = None
    for label, quantization, patched in (
        ("bfloat16, the file's order", "none", False),
        ("bfloat16, shuffled", "none", True),
        ("int8, shuffled", "int8", True),
        ("int4, shuffled", "int4", True),
    ):
        with mock.patch.object(loader, "build_decoder", shuffled if patched else build_decoder):
            llm = LLM("demo", quantization=quantization)
        assert llm.tokenizer is not None
        ids = llm.tokenizer.encode(reference_text(), add_special_tokens=False)
        found = loss(llm, list(windows(ids, TOKENS, WINDOW)))
        base = found if base is None else base
        print(f"{label}: {found:.4f} ({found / base - 1:+.2%})", flush=True)


if __name__ == "__main__":
    main()
