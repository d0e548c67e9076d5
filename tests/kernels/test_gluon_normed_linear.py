"""The engine's norm, linear layer and gate through the Hopper products, in the simulator."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from rooftile.kernels.reference import norm
from rooftile.kernels.reference.normed_linear import normed_linear
from tests.support.gluon_sim import load_simulated, simulation

NORMED, FORWARD, PLAN = load_simulated(
    "rooftile.kernels.gluon.normed_linear",
    "rooftile.kernels.gluon.gemm.forward",
    "rooftile.kernels.gluon.gemm.plan",
)


@pytest.mark.parametrize("activation", ["", "silu"])
@pytest.mark.parametrize("shape", [(5, 64), (2, 3, 64), (70, 64)])
def test_products_follow_the_norm(
    activation: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        FORWARD,
        "_choose",
        lambda a, b, *_: PLAN.choose_plan(a.shape[0], b.shape[1], a.shape[1], 2, 3),
    )
    portable = SimpleNamespace(rms_norm=norm.rms_norm)
    monkeypatch.setitem(sys.modules, "rooftile.kernels.triton.norm", portable)
    generator = torch.Generator().manual_seed(3)

    def draw(*sizes: int) -> torch.Tensor:
        return torch.randint(-3, 4, sizes, generator=generator).bfloat16()

    arguments = (
        *(draw(*shape), draw(*shape), draw(64), 1e-5, 1.0),
        *(draw(48, 64), draw(48), activation),
    )
    with simulation(residency=3):
        out, stream = NORMED.normed_linear(*arguments)
    exact, kept = normed_linear(*arguments)
    assert torch.equal(stream, kept)
    assert out.shape == exact.shape
    allowed = 0.02 * exact.float().abs() + 0.05 * exact.float().abs().mean()
    assert bool(((out.float() - exact.float()).abs() <= allowed).all())


def test_it_is_taken_where_the_switch_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    call = SimpleNamespace(device="cpu", dtype=torch.bfloat16, activation="silu")
    assert "compute capability 9.0" in str(NORMED.supports(call))
    assert NORMED.efficiency(call) < 0.6
    monkeypatch.setenv("ROOFTILE_LINEAR", "stream-k")
    assert NORMED.efficiency(call) == 1.0
