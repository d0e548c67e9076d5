"""Building without a GPU: what is compiled, what is found again, and that lengths compile nothing."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from rooftile.bench.ops.attention import SUITE
from rooftile.kernels.offline import TARGETS, capability, offline


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def run(
    family: str,
    lens: list[tuple[int, int]],
    ragged: bool,
    causal: bool,
    dim: int = 64,
    heads: int = 2,
) -> None:
    kernels: Any = import_module(f"rooftile.kernels.{family}.attention")
    options = (None, -1, 0 if causal else -1, 0.0, 0.1)
    q_lens, kv_lens = zip(*lens, strict=True)
    if ragged:
        cu = [torch.tensor([0, *n]).cumsum(0).int() for n in (q_lens, kv_lens)]
        q, k = (torch.empty(sum(n), heads, dim, dtype=torch.bfloat16) for n in (q_lens, kv_lens))
        kernels.attention_varlen(q, k, k, *cu, max(q_lens), max(kv_lens), *options)
        return
    for m, n in lens:
        q, k = (torch.empty(3, length, heads, dim, dtype=torch.bfloat16) for length in (m, n))
        kernels.attention(q, k, k, *options)


LENGTHS = [(1, 1), (16, 16), (17, 300), (128, 77), (513, 1025), (2048, 2048)]


@pytest.mark.parametrize("ragged", [False, True])
def test_lengths_compile_nothing_in_the_portable_kernel(directory: Path, ragged: bool) -> None:
    with offline("sm_90a", directory) as built:
        run("triton", LENGTHS[:1], ragged, True)
        first = len(built)
        run("triton", LENGTHS, ragged, True)
        run("triton", [(n, n + 5) for n in range(1, 40)], ragged, True)
    assert first == len(built) == 1


@pytest.mark.parametrize(
    ("ragged", "heads", "kernels"),
    [
        (False, 12, 1),
        pytest.param(True, 12, 1, marks=pytest.mark.slow),
        # Few tiles are cut along their keys, and whole ones are what other lengths of the class need.
        pytest.param(False, 2, 2, marks=pytest.mark.slow),
    ],
)
def test_lengths_within_a_class_compile_nothing_in_the_hopper_kernel(
    directory: Path, ragged: bool, heads: int, kernels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gluon: Any = import_module("rooftile.kernels.gluon.attention")
    # What another test of this process called and built.
    monkeypatch.setattr(gluon.forward, "_dense", {})
    monkeypatch.setattr(gluon.forward, "_ragged", {})
    monkeypatch.setattr(import_module("rooftile.kernels.gluon.launch"), "_compiled", {})
    gluon.kernel.attention_kernel.device_caches.clear()
    long = [(m + 6000, n + 6000) for m, n in LENGTHS]
    with offline("sm_90a", directory) as built:
        run("gluon", long[:1], ragged, False, heads=heads)
        first = len(built)
        run("gluon", long, ragged, False, heads=heads)
    assert first == kernels
    assert all(one.found for one in built[first:]), "a length compiled a kernel"


def test_a_second_process_would_find_everything(directory: Path) -> None:
    case = "b2 s300 h2/2 d64 causal"
    for attempt in range(2):
        with offline("sm_90a", directory) as built:
            # A new process has no kernel in memory: forget those of this one.
            import_module(
                "rooftile.kernels.triton.attention"
            ).attention_kernel.device_caches.clear()
            assert SUITE.build is not None
            SUITE.build(case, torch.bfloat16, "triton")
        assert [one.found for one in built] == ([built[0].found] if attempt == 0 else [True])
    assert list(directory.rglob("*.cubin"))


def test_targets_differ_and_the_context_ends(directory: Path) -> None:
    cpu = torch.device("cpu")
    assert capability(cpu) == (0, 0)
    for name in ("sm_80", "sm_90a"):
        with offline(name, directory) as built:
            assert capability(cpu) == TARGETS[name].capability
            run("triton", [(64, 64)], False, False, dim=128)
        assert len(built) <= 1
    assert capability(cpu) == (0, 0)
    with pytest.raises(ValueError, match="no target 'sm_50'"), offline("sm_50"):
        pass


def test_how_many_requests_there_are_compiles_at_most_two_kernels_that_find_prefixes(
    directory: Path,
) -> None:
    prefixes: Any = import_module("rooftile.kernels.triton.prefixes")
    prefixes.groups_kernel.device_caches.clear()  # of what another test built
    with offline("sm_90a", directory) as built:
        for batch in (1, 31, 32, 33, 511, 513, 70_000):
            lengths = torch.zeros(batch + 1, dtype=torch.int32)
            table = torch.zeros(batch, 2, dtype=torch.int32)
            prefixes.find_prefixes(lengths, lengths[1:], table, 16, 256)
    assert [one.kernel for one in built].count("groups_kernel") == 2


@pytest.mark.parametrize("groups", [0, 2])
def test_plans_compile_once_for_all_lengths(directory: Path, groups: int) -> None:
    """What the interpreter takes, the compiler need not: names that change their type."""
    from rooftile.kernels.triton.split_kv import split_kv
    from rooftile.types import SplitSpec

    spec = SplitSpec(
        batch=40, tokens=40, max_q_len=1, max_kv_len=9000, group_size=4, num_kv_heads=8, left=-1,
        right=0, kv_tile=64, tile_rows=(64,), tile_cost=(3448,), item_cost=2750, num_ctas=256,
        min_piece=1, groups=groups, least_saved=4096 if groups else 0,
    )  # fmt: skip
    with offline("sm_90a", directory) as built:
        for batch in (40, 33):
            lens = torch.arange(batch + 1, dtype=torch.int32)
            shared = torch.tensor([0, 30, batch]).int(), torch.tensor([8192, 0]).int()
            split_kv(lens, lens[1:], spec.numbers, *(shared if groups else ()))
    assert [kernel.kernel for kernel in built] == ["split_kv_single_kernel"]
