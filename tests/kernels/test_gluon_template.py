"""The load-compute-finish template under both tutorials' kernels, and pieces of the tile layer alone.

In the simulator; tests/kernels/test_tutorial_machine_code.py compiles the same files.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rooftile.kernels.reference import attention as reference
from tests.support.gluon_sim import load_simulated, simulation

EXAMPLES = ("docs.examples.gemm", "docs.examples.attention")
GEMM, ATTENTION, MATRIX, PIECES, RING = load_simulated(
    *EXAMPLES, "rooftile.kernels.gluon.tile.matrix", "tests.kernels.gluon_pieces",
    "rooftile.kernels.gluon.tile.ring",
)  # fmt: skip
for name in EXAMPLES:
    sys.modules.pop(name, None)


@pytest.fixture(autouse=True)
def two_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer than tiles, so that the persistent loops go around."""
    for module in (GEMM, ATTENTION):
        monkeypatch.setattr(module, "multiprocessors", lambda device: 2)


@settings(max_examples=10)
@given(
    m=st.sampled_from([1, 128, 200]), n=st.sampled_from([8, 128, 264]),
    k=st.sampled_from([8, 64, 328]), seed=st.integers(0, 2**16),
)  # fmt: skip
def test_the_gemm_of_the_tutorial(m: int, n: int, k: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    a, b = (torch.randint(-4, 5, (rows, k), generator=g).bfloat16() for rows in (m, n))
    with simulation(seed=seed):
        c = GEMM.gemm(a, b)
    exact = (a.float() @ b.float().T).bfloat16()  # integers are exact in float32
    assert torch.equal(c, exact)


@settings(max_examples=8)
@given(
    lengths=st.sampled_from([(1, 1), (64, 128), (130, 257), (200, 90), (150, 300)]),
    heads=st.sampled_from([(1, 1), (2, 1)]), dim=st.sampled_from([64, 128]),
    causal=st.booleans(), seed=st.integers(0, 2**16),
)  # fmt: skip
def test_the_attention_of_the_tutorial(
    lengths: tuple[int, int], heads: tuple[int, int], dim: int, causal: bool, seed: int
) -> None:
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(1, lengths[0], heads[0], dim, generator=g).bfloat16()
    k, v = (torch.randn(1, lengths[1], heads[1], dim, generator=g).bfloat16() for _ in range(2))
    with simulation(seed=seed):
        out, lse = ATTENTION.attention(q, k, v, causal)
    options = (None, -1, 0 if causal else -1, 0.0, dim**-0.5)
    exact, exact_lse = reference.attention(q.double(), k.double(), v.double(), *options)
    error = (out.double() - exact).abs().amax(-1)
    assert bool((error <= 2**-7 * (exact.abs().amax(-1) + 0.05)).all())
    assert torch.equal(lse == -torch.inf, exact_lse == -torch.inf)
    seen = exact_lse > -torch.inf
    assert torch.allclose(lse[seen].double(), exact_lse[seen], atol=1e-5)


def test_an_early_release_in_a_users_step_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a tutorial's reader may get wrong first: releasing K before the product has read it."""
    arrived, release = RING.Ring.arrived, RING.Ring.release

    def release_at_once(self: Any, at: Any, pred: bool = True) -> None:
        arrived.function(self, at, pred)
        release.function(self, at)

    monkeypatch.setattr(RING.Ring, "arrived", release_at_once)
    monkeypatch.setattr(RING.Ring, "release", lambda self, at, pred=True: None)
    q = torch.randn(1, 128, 1, 64).bfloat16()
    k = torch.randn(1, 700, 1, 64).bfloat16()
    options = (None, -1, -1, 0.0, 0.125)
    exact, _ = reference.attention(q.double(), k.double(), k.double(), *options)

    def right(seed: int) -> bool:
        with simulation(seed=seed):
            out, _ = ATTENTION.attention(q, k, k)
        return torch.allclose(out.double(), exact, atol=0.02)

    assert not all(right(seed) for seed in range(4))
    monkeypatch.undo()
    monkeypatch.setattr(ATTENTION, "multiprocessors", lambda device: 2)
    assert all(right(seed) for seed in range(4))


def test_matrices_are_described_as_they_lie() -> None:
    x = torch.zeros(10, 64).bfloat16()[:, :48]
    box = MATRIX.describe_matrix(x, 8, 64)
    assert (box.shape, box.strides, box.block_shape) == ((10, 48), (64, 1), (8, 64))
    _, inside = box.at(x).addresses([8, 0])
    assert inside[:, :48].all(1).tolist() == [True, True] + [False] * 6
    assert not bool(inside[:, 48:].any())


@pytest.mark.parametrize("closed", [False, True])
def test_records_have_methods_and_compile_time_fields(closed: bool) -> None:
    out = torch.zeros(1, dtype=torch.int32)
    PIECES.ends[(1,)](out, closed)
    assert out.item() == (3 if closed else 4)


@pytest.mark.parametrize("dynamic", [False, True])
@given(ctas=st.integers(1, 4), tiles=st.integers(0, 9), seed=st.integers(0, 2**16))
def test_a_queue_tells_every_consumer_of_every_tile_once(
    dynamic: bool, ctas: int, tiles: int, seed: int
) -> None:
    counter = torch.zeros(2, dtype=torch.int32)
    seen, squares = (
        torch.zeros(2, tiles + 1, dtype=torch.int32),
        torch.zeros(tiles + 1, dtype=torch.int32),
    )
    for _ in range(2):  # a dynamic queue leaves its counter as it found it
        with simulation(seed=seed, residency=4):
            PIECES.count_tiles[(ctas,)](counter, seen.view(-1), squares, tiles, dynamic)
        assert counter.tolist() == [0, 0]
    told = seen.view(-1)[: 2 * tiles].view(2, tiles)
    assert bool((told == 2).all())
    assert squares.tolist()[:tiles] == [t * t for t in range(tiles)]


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_fills_go_around_and_flip_their_phase(stages: int) -> None:
    ring = RING.Ring.__new__(RING.Ring)
    ring.stages = stages
    fills = [RING.first_fill()]
    for _ in range(12):
        fills.append(ring.after(fills[-1]))
    assert [(at.stage, at.phase) for at in fills] == [
        (i % stages, i // stages % 2) for i in range(13)
    ]
    assert all((a.stage, a.phase) != (b.stage, b.phase) for a, b in pairwise(fills))


@pytest.mark.parametrize(("name", "most"), [("gemm", 59), ("attention", 135)])
def test_tutorials_are_as_short_as_they_say_and_quote_their_code(name: str, most: int) -> None:
    code = Path(f"docs/examples/{name}.py").read_text()
    after_imports = code[code.index("\n\n\n") :]
    assert len([line for line in after_imports.splitlines() if line.strip()]) <= most
    text = Path(f"docs/tutorial_{name}.md").read_text()
    quoted = [part.split("```")[0] for part in text.split("```python\n")[1:]]
    assert quoted
    for block in quoted:
        for line in filter(str.strip, block.splitlines()):
            assert line in code, f"docs/tutorial_{name}.md quotes {line!r}"
