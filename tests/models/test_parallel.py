"""Tensor parallelism: two processes compute what one computes, and odd splits are refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rooftile.distributed.group import ParallelGroup
from rooftile.models.build import head_shares
from rooftile.models.config import AttentionSpec
from rooftile.models.loader import load_model
from tests.models import hugging_face
from tests.models.parallel_worker import logits

MODELS = {
    "llama with biases": (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "vocab_size": 67, "num_hidden_layers": 2},
    ),
    # Two ranks share the one kv head, and the vocabulary of 66 splits evenly.
    "qwen3 tied, one kv head": (
        "qwen3",
        {"num_key_value_heads": 1, "head_dim": 8, "tie_word_embeddings": True, "vocab_size": 66},
    ),
    # Two groups of pages, norms after each branch, caps.
    "gemma2": (
        "gemma2",
        {"head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 5, "pad_token_id": 0},
    ),
    # Pairs of heads stay together, wherever the checkpoint has their halves.
    "diffllama": (
        "diffllama",
        {"head_dim": 8, "num_attention_heads": 8, "num_key_value_heads": 4, "attention_bias": True},
    ),
    # Two ranks share the one pair of kv heads.
    "diffllama, one kv pair": ("diffllama", {"head_dim": 8, "num_key_value_heads": 2}),
    # Each rank has half of every expert.
    "mixtral": ("mixtral", {"num_local_experts": 3, "num_hidden_layers": 2}),
    # Each rank reads its rows out of fused matrices.
    "phi3": ("phi3", {"pad_token_id": 0, "eos_token_id": 1, "num_hidden_layers": 2}),
}


def test_two_processes_equal_one(tmp_path: Path) -> None:
    directories = []
    for index, (model_type, options) in enumerate(MODELS.values()):
        directory = tmp_path / f"model{index}"
        hugging_face.save(hugging_face.random_model(model_type, **options), directory)
        directories.append(str(directory))
    command = [sys.executable, "-m", "tests.models.parallel_worker"]
    root = Path(__file__).parents[2]
    workers = [
        subprocess.Popen(
            [
                *command,
                str(rank),
                "2",
                str(tmp_path / "store"),
                str(tmp_path / "out"),
                *directories,
            ],
            cwd=root,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]
    try:
        assert [worker.wait(timeout=600) for worker in workers] == [0, 0]
    finally:
        for worker in workers:
            worker.kill()
    ranks = [torch.load(tmp_path / f"out.{rank}.pt") for rank in range(2)]
    for directory in directories:
        for random_weights in (False, True):
            expected = logits(directory, random_weights, None)
            first, second = (rank[directory, random_weights] for rank in ranks)
            assert torch.equal(first, second), "ranks must agree to the bit, they sample alike"
            torch.testing.assert_close(first, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "message"),
    [
        (6, 6, 4, "cannot split 6 query heads over 4 processes; use a number.* divides 6"),
        (12, 3, 4, None),
        (12, 3, 6, None),
        (8, 4, 2, None),
        (8, 2, 8, None),
    ],
)
def test_how_heads_are_split(heads: int, kv_heads: int, size: int, message: str | None) -> None:
    spec = AttentionSpec(heads, kv_heads, head_dim=4)
    if message is None and size % kv_heads and kv_heads % size:
        message = f"cannot split {kv_heads} kv heads over {size} processes"
    if message is not None:
        with pytest.raises(ValueError, match=message):
            head_shares(spec, ParallelGroup(0, size))
        return
    repeat = heads // kv_heads
    for rank in range(size):
        mine, kv = head_shares(spec, ParallelGroup(rank, size))
        needed = {head // repeat for head in range(mine.start, mine.stop)}
        assert needed == set(range(kv.start, kv.stop))


def test_refusals_come_before_the_weights_are_read(tmp_path: Path) -> None:
    hugging_face.save(hugging_face.random_model("llama", num_hidden_layers=1), tmp_path)
    hugging_face.edit_config(tmp_path, intermediate_size=48)
    with pytest.raises(ValueError, match="cannot split 4 query heads over 3 processes"):
        load_model(str(tmp_path), random_weights=True, parallel=ParallelGroup(0, 3))
    hugging_face.edit_config(tmp_path, intermediate_size=49)
    with pytest.raises(ValueError, match="cannot split 49 columns of the feed-forward"):
        load_model(str(tmp_path), random_weights=True, parallel=ParallelGroup(1, 2))


def test_norms_over_all_heads_do_not_split(tmp_path: Path) -> None:
    options = {"num_hidden_layers": 1, "pad_token_id": 0, "eos_token_id": 1}
    hugging_face.save(hugging_face.random_model("olmo2", **options), tmp_path)
    with pytest.raises(NotImplementedError, match="norms run over all 4 heads together.*use one p"):
        load_model(str(tmp_path), random_weights=True, parallel=ParallelGroup(0, 2))


def test_groups_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="size is 0"):
        ParallelGroup(0, 0)
    with pytest.raises(ValueError, match=r"rank is 2; it must be in \[0, 2\)"):
        ParallelGroup(2, 2)


def test_a_group_of_one_never_touches_torch_distributed() -> None:
    x = torch.randn(3, 4)
    group = ParallelGroup()
    assert group.all_reduce(x) is x
    assert group.all_gather(x) is x
