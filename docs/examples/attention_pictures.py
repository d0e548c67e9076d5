"""Draws docs/images/dual_chunk_positions.png and differential.png: python docs/examples/attention_pictures.py"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from matplotlib import pyplot

from rooftile import attention, differential_attention

IMAGES = Path(__file__).parents[1] / "images"


def relative_positions(length: int, chunk_size: int, local_size: int) -> np.ndarray:
    """[query, key]: what the rotation of query i against key j amounts to; NaN where j > i."""
    chunk = chunk_size - local_size
    i, j = np.arange(length)[:, None], np.arange(length)[None, :]
    apart = np.minimum(i // chunk - j // chunk, 2)
    query = np.where(
        apart == 0,
        i % chunk,
        np.where(
            apart == 1, np.minimum(i % chunk + chunk, chunk_size), min(2 * chunk - 1, chunk_size)
        ),
    )
    return np.where(j <= i, query - j % chunk, np.nan)


def draw_positions() -> None:
    length, chunk_size, local_size = 40, 16, 4
    figure, axes = pyplot.subplots(1, 2, figsize=(8, 3.8), layout="constrained")
    plain = np.arange(length)[:, None] - np.arange(length)[None, :].astype(float)
    plain[plain < 0] = np.nan
    shown = (
        (axes[0], plain, "plain: distance of query and key"),
        (
            axes[1],
            relative_positions(length, chunk_size, local_size),
            f"dual chunk, chunk_size {chunk_size}, local_size {local_size}",
        ),
    )
    for ax, values, title in shown:
        image = ax.imshow(values, vmin=0, vmax=length - 1, cmap="viridis")
        ax.set(title=title, xlabel="key", ylabel="query")
        ax.title.set_fontsize(10)
    figure.colorbar(image, ax=axes, label="relative position")
    figure.savefig(IMAGES / "dual_chunk_positions.png", dpi=110)


def draw_softmaxes() -> None:
    """Weights of one query: read out by values that are unit vectors."""
    torch.manual_seed(3)
    keys, dim = 48, 16
    target = 30
    noise, own1, own2 = (torch.randn(1, keys, 1, dim) for _ in range(3))
    q1, other = (torch.randn(1, 1, 1, dim) for _ in range(2))
    # Both queries like the same distracting keys; the first likes one key more.
    k1, k2 = noise + 0.1 * own1, noise + 0.1 * own2
    q2 = q1 + 0.05 * other
    k1[:, target] = q1[:, 0] * 0.6
    values = torch.eye(keys)[None, :, None]
    first = attention(q1, k1, values)[0, 0, 0]
    second = attention(q2, k2, values)[0, 0, 0]
    both = differential_attention(q1, k1, q2, k2, values, 0.7)[0, 0, 0]
    figure, axes = pyplot.subplots(
        3, 1, figsize=(7, 4), sharex=True, sharey=True, layout="constrained"
    )
    for ax, weights, title in zip(
        axes,
        (first, second, both),
        ("softmax 1", "softmax 2", "softmax 1 - 0.7 softmax 2"),
        strict=True,
    ):
        colors = ["C1" if i == target else "C0" for i in range(keys)]
        ax.bar(range(keys), weights.numpy(), color=colors)
        ax.axhline(0, color="grey", linewidth=0.6)
        ax.set_ylabel("weight")
        ax.set_title(title, fontsize=10, loc="left")
    axes[-1].set_xlabel("key")
    figure.savefig(IMAGES / "differential.png", dpi=110)


if __name__ == "__main__":
    draw_positions()
    draw_softmaxes()
