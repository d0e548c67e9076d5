"""Peers that read the same GGUF file: llama.cpp and OpenVINO GenAI."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rooftile.bench.failure import MeasurementFailed
from rooftile.bench.workloads import Request


def _gguf(name: str, model: str, random_weights: bool) -> Path:
    from rooftile.models.resolve import resolve

    path = resolve(model, need_weights=True).path
    if random_weights or not path.is_file():
        raise ValueError(
            f"the peer {name!r} runs GGUF files with their own weights, not {model!r}"
            f"{' with random ones' if random_weights else ''}"
        )
    return path


def _check_greedy(name: str, requests: Sequence[Request], temperature: float) -> None:
    if temperature or any(request.n > 1 for request in requests):
        raise ValueError(
            f"the peer {name!r} runs greedy workloads with one answer; leave it out of others"
        )


class LlamaCpp:
    """llama.cpp through llama-cpp-python: batches of up to 32 sequences, greedy, the file's weights."""

    name = "llama-cpp"
    packages, extra = ("llama_cpp",), "cpu-peers"
    batch = 32
    batch_tokens = 2048

    def __init__(self, model: str, random_weights: bool = False) -> None:
        path = _gguf(self.name, model, random_weights)
        try:
            import llama_cpp
        except ImportError:
            raise ValueError(
                "the peer 'llama-cpp' is not installed: pip install 'rooftile[cpu-peers]'"
            ) from None
        self._api: Any = llama_cpp
        self._quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._quiet, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(
            str(path).encode(), llama_cpp.llama_model_default_params()
        )
        if not self._model:
            raise ValueError(f"llama.cpp cannot load {path}")
        vocabulary = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab = llama_cpp.llama_vocab_n_tokens(vocabulary)

    def run(self, requests: Sequence[Request], temperature: float) -> list[int]:
        _check_greedy(self.name, requests, temperature)
        made: list[int] = []
        for start in range(0, len(requests), self.batch):
            made += self._run_batch(requests[start : start + self.batch])
        return made

    def _run_batch(self, requests: Sequence[Request]) -> list[int]:
        import torch

        api = self._api
        params = api.llama_context_default_params()
        longest = max(len(r.prompt_token_ids) + r.max_tokens for r in requests)
        params.n_ctx, params.n_seq_max = -(-longest // 256) * 256 * len(requests), len(requests)
        params.n_batch, params.n_threads = self.batch_tokens, torch.get_num_threads()
        params.n_threads_batch = params.n_threads
        context = api.llama_init_from_model(self._model, params)
        batch = api.llama_batch_init(self.batch_tokens, 0, 1)
        try:
            lengths = [len(r.prompt_token_ids) for r in requests]
            last = [
                self._prompt(context, batch, i, r.prompt_token_ids) for i, r in enumerate(requests)
            ]
            made = [1] * len(requests)
            while True:
                open_ones = [i for i, r in enumerate(requests) if made[i] < r.max_tokens]
                if not open_ones:
                    return made
                entries = [(last[i], lengths[i] + made[i] - 1, i, True) for i in open_ones]
                self._decode(context, batch, entries)
                for at, i in enumerate(open_ones):
                    last[i] = self._likeliest(context, at)
                    made[i] += 1
        finally:
            api.llama_batch_free(batch)
            api.llama_free(context)

    def _prompt(self, context: Any, batch: Any, sequence: int, tokens: tuple[int, ...]) -> int:
        for start in range(0, len(tokens), self.batch_tokens):
            part = tokens[start : start + self.batch_tokens]
            ends = start + len(part) == len(tokens)
            count = len(part)
            self._decode(
                context,
                batch,
                [(t, start + j, sequence, ends and j == count - 1) for j, t in enumerate(part)],
            )
        return self._likeliest(context, count - 1)

    def _decode(
        self, context: Any, batch: Any, entries: Sequence[tuple[int, int, int, bool]]
    ) -> None:
        """entries: token, position, sequence, whether its logits are wanted."""
        batch.n_tokens = len(entries)
        for at, (token, position, sequence, wanted) in enumerate(entries):
            batch.token[at], batch.pos[at] = token, position
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence
            batch.logits[at] = wanted
        code = self._api.llama_decode(context, batch)
        if code:
            raise MeasurementFailed(f"llama.cpp failed with code {code}")

    def _likeliest(self, context: Any, at: int) -> int:
        import numpy as np

        logits = self._api.llama_get_logits_ith(context, at)
        return int(np.ctypeslib.as_array(logits, (self._vocab,)).argmax())


class OpenVino:
    """OpenVINO GenAI's continuous batching, greedy, the file's weights (as 4 bits, 8 or 16)."""

    name = "openvino"
    packages, extra = ("openvino", "openvino_genai"), "cpu-peers"

    def __init__(self, model: str, random_weights: bool = False) -> None:
        path = _gguf(self.name, model, random_weights)
        try:
            import openvino
            import openvino_genai
        except ImportError:
            raise ValueError(
                "the peer 'openvino' is not installed: pip install 'rooftile[cpu-peers]'"
            ) from None
        import torch

        self._tensor: Any = openvino.Tensor
        self._config: Any = openvino_genai.GenerationConfig
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = 1  # GB
        scheduler.max_num_batched_tokens = 2048
        scheduler.enable_prefix_caching = False
        options = {"INFERENCE_NUM_THREADS": torch.get_num_threads()}
        self._pipeline: Any = openvino_genai.ContinuousBatchingPipeline(
            str(path), scheduler, "CPU", options, {}, {}
        )

    def run(self, requests: Sequence[Request], temperature: float) -> list[int]:
        import numpy as np

        _check_greedy(self.name, requests, temperature)
        ids = [
            self._tensor(np.asarray(request.prompt_token_ids, dtype=np.int64)[None])
            for request in requests
        ]
        configs = [
            self._config(max_new_tokens=request.max_tokens, ignore_eos=True, do_sample=False)
            for request in requests
        ]
        results = self._pipeline.generate(ids, configs)
        return [len(result.m_generation_ids[0]) for result in results]
