"""Layers of equal spec form one KV group."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from rooftile.kvcache import KVGroup, group_layers
from rooftile.types import KVSpec

FULL = KVSpec(heads=2, k_dim=8, v_dim=8, dtype=torch.bfloat16)
WINDOW = replace(FULL, window=128)


def test_groups_by_equal_spec_in_order_of_first_layer() -> None:
    groups = group_layers([WINDOW, FULL, replace(WINDOW), FULL, replace(FULL, v_dim=16)])
    assert [(group.spec, group.layers) for group in groups] == [
        (WINDOW, (0, 2)),
        (FULL, (1, 3)),
        (replace(FULL, v_dim=16), (4,)),
    ]
    assert groups[0].bytes_per_token == 2 * 2 * (8 + 8) * 2
    assert group_layers([]) == ()


@pytest.mark.parametrize("name", ["heads", "k_dim", "v_dim"])
def test_a_layer_that_keeps_nothing_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"layers \[0\]: {name} is 0; it must be at least 1"):
        group_layers([replace(FULL, **{name: 0})])
    with pytest.raises(ValueError, match="layers is empty"):
        KVGroup(FULL, ())


def test_page_accounting_does_not_import_torch() -> None:
    code = "import sys, rooftile.kvcache; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
