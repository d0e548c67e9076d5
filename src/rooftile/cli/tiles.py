"""Which tile our kernels would take on a machine, and why: read from the kernels' own tables."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rooftile
from rooftile.planning.attention_case import AttentionCase
from rooftile.planning.hardware import H100, H200
from rooftile.planning.pipeline import Tile


@dataclass(frozen=True)
class Choice:
    """dims: of k and v as they are multiplied; streams: parts of the tile that alternate."""

    kernel: str
    tile: Tile
    k_dim: int
    v_dim: int
    streams: int
    reason: str


def choice(case: AttentionCase, machine: str) -> Choice:
    """Raises ValueError for head dims that no kernel of the machine takes."""
    if machine in ("h100", "h200"):
        return _hopper(case, machine)
    if machine == "b200":
        return _portable(case)
    if machine == "cpu":
        return _fused_cpu(case)
    hopper = _hopper(case)
    reason = "there is no kernel of ours for it; this is the tile of a Hopper GPU, to compare"
    return Choice("none", hopper.tile, hopper.k_dim, hopper.v_dim, 2, reason)


def _hopper(case: AttentionCase, machine: str = "h200") -> Choice:
    table = _hopper_table()
    _check_dims(case, max(table.CONFIGS), "Hopper")
    longest = max(case.kv_lens)
    short = table.short_of(case.k_dim, case.v_dim, longest, not case.ragged, case.causal)
    if short is not None:
        reason = (
            f"all keys are one tile, which needs no roles, turns or running maximum: "
            f"{short.ctas} CTAs of one warpgroup share an SM and overlap each other"
        )
        tile = Tile(short.rows, short.keys, 1)
        return Choice("gluon", tile, short.dim, short.dim, short.ctas, reason)
    q_len = max(case.q_lens)
    config = table.config_of(case.k_dim, case.v_dim, q_len, 0 if case.causal else -1)
    usual = table.CONFIGS[config.dim]
    if (config.tile_rows, config.block) == (usual.tile_rows, usual.block):
        reason = f"the table's entry for head dims up to {config.dim}"
    else:
        reason = (
            f"at {q_len} queries {config.tile_rows} rows by {config.block} keys instead of the "
            f"{usual.tile_rows} by {usual.block} of longer ones: less is wasted past the end and on "
            f"the diagonal, and a short tile starts sooner"
        )
    reason += f"; {config.groups} warpgroups of 64 rows, {config.consumer_registers} registers each"
    if config.ctas > 1:
        reason += f", {config.ctas} CTAs an SM"
    if config.anchored:
        reason += (
            "; enough blocks a tile that leaving the row maximum at that of the first keys saves more "
            "instructions than the check at the tile's end costs"
        )
    reason += _cut(case, table, config, (H100 if machine == "h100" else H200).units)
    tile = Tile(config.tile_rows, config.block, config.stages)
    k_dim, v_dim = (table.columns_used(config.dim, dim) for dim in (case.k_dim, case.v_dim))
    return Choice("gluon", tile, k_dim, v_dim, config.groups, reason)


def _cut(case: AttentionCase, table: Any, config: Any, units: int) -> str:
    """Whether few tiles are cut along their keys: of calls whose lengths the host knows."""
    q_len, kv_len = case.q_lens[0], case.kv_lens[0]
    same = set(case.q_lens) == {q_len} and set(case.kv_lens) == {kv_len}
    if not same or (case.ragged and case.batch > 1):
        return ""
    right = 0 if case.causal else -1
    heads, places = case.batch * case.num_q_heads, units * config.ctas
    head_bytes = kv_len * (case.k_dim + case.v_dim) * 2
    group_size = case.num_q_heads // case.num_kv_heads
    section = table.section_of(config.dim, q_len, right, head_bytes, group_size, heads)
    last_first = case.causal or case.ragged
    shares = table.shares_of(
        *(config, heads, q_len, kv_len, -1, right, places, last_first),
        *(head_bytes * case.batch * case.num_kv_heads, 0 if case.ragged else section),
    )
    if shares is None:
        return ""
    tiles = -(-q_len // config.tile_rows) * heads
    return (
        f"; {tiles} whole tiles would leave CTAs without work, so they are cut along their keys into "
        f"{sum(map(len, shares.items))} items for {len(shares.items)} CTAs"
    )


def _check_dims(case: AttentionCase, largest: int, kernel: str) -> None:
    if max(case.k_dim, case.v_dim) > largest:
        raise ValueError(
            f"head dims {case.k_dim} and {case.v_dim} are beyond {largest}, the largest of the "
            f"{kernel} kernel; choose smaller ones"
        )


def _hopper_table() -> Any:
    """The module of the Hopper kernel's configurations, without its package, which needs Triton and
    torch and takes seconds to load.
    """
    name = "rooftile_hopper_attention_config"
    if name in sys.modules:
        return sys.modules[name]
    path = Path(rooftile.__path__[0]) / "kernels" / "gluon" / "attention" / "config.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def _portable(case: AttentionCase) -> Choice:
    from rooftile.kernels.triton.attention_tiles import LARGEST_DIM, config_of

    _check_dims(case, LARGEST_DIM, "portable")
    k_dim, v_dim = (max(16, 1 << (dim - 1).bit_length()) for dim in (case.k_dim, case.v_dim))
    config = config_of(max(k_dim, v_dim), 2, max(case.q_lens), case.causal)
    reason = (
        "the Hopper kernel needs compute capability 9.0, so the portable one runs; its table has "
        f"this for head dim {max(k_dim, v_dim)}, measured on an H200"
    )
    tile = Tile(config.tile_rows, config.block, config.num_stages)
    return Choice("triton", tile, k_dim, v_dim, 1, reason)


def _fused_cpu(case: AttentionCase) -> Choice:
    q_len = max(case.q_lens)
    rows = 256 if q_len >= 768 else 64 if q_len >= 192 else 32
    reason = f"PyTorch's fused CPU kernel takes {rows} rows at {q_len} queries, and 512 keys"
    return Choice("torch", Tile(rows, 512, 1), case.k_dim, case.v_dim, 1, reason)
