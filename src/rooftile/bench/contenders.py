"""Who runs a workload: Rooftile's engine, or a peer from the same weights in the same process."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol

from rooftile.bench.failure import MeasurementFailed
from rooftile.bench.other_engines import LlamaCpp, OpenVino
from rooftile.bench.workloads import Request

if TYPE_CHECKING:
    from rooftile.engine.llm import LLM


class Contender(Protocol):
    name: str

    def run(self, requests: Sequence[Request], temperature: float) -> list[int]:
        """Run all requests to their full length. Returns the new tokens of each, all answers."""


class Engine:
    """Rooftile. The prefix cache is emptied before each run, so a repeat cannot profit from it."""

    name = "rooftile"

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def run(self, requests: Sequence[Request], temperature: float) -> list[int]:
        from rooftile.engine.params import SamplingParams

        self._llm.reset_prefix_cache()
        outputs = self._llm.generate(
            [list(request.prompt_token_ids) for request in requests],
            [
                SamplingParams(
                    temperature=temperature, max_tokens=r.max_tokens, n=r.n, ignore_eos=True
                )
                for r in requests
            ],
        )
        return [sum(len(answer.token_ids) for answer in output.outputs) for output in outputs]


class Transformers:
    """Hugging Face transformers' generate: bf16, sdpa, left-padded batches in order of arrival.

    A batch runs until its longest answer is done; tokens beyond a request's own length are not
    counted.
    """

    name = "transformers"
    packages, extra = ("transformers", "accelerate"), "peers"  # the second reads GGUF files
    batch = 32

    def __init__(self, model: str, random_weights: bool = False, device: str = "cpu") -> None:
        try:
            import transformers
            from transformers.utils.logging import disable_progress_bar
        except ImportError:
            raise ValueError(
                "the peer 'transformers' is not installed: pip install 'rooftile[peers]'"
            ) from None
        import torch

        from rooftile.models.resolve import resolve

        path = resolve(model, need_weights=not random_weights).path
        where: dict[str, Any] = {"pretrained_model_name_or_path": path}
        if path.is_file():
            where = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
        settings: dict[str, Any] = {"dtype": torch.bfloat16, "attn_implementation": "sdpa"}
        disable_progress_bar()
        if random_weights:
            config = transformers.AutoConfig.from_pretrained(**where)
            self._model = transformers.AutoModelForCausalLM.from_config(config, **settings)
        else:
            # From 5.x on, transformers may compute on a GGUF file's packed blocks, which is slower.
            if path.is_file() and hasattr(transformers, "GgufConfig"):
                settings["quantization_config"] = transformers.GgufConfig(dequantize=True)
            self._model = transformers.AutoModelForCausalLM.from_pretrained(**where, **settings)
        kept = {p.dtype for p in self._model.parameters()} - {torch.bfloat16}
        if kept:
            raise MeasurementFailed(
                f"transformers loaded {path} with parameters in {kept}, not bfloat16"
            )
        self._model.eval()
        self._device = torch.device(device)
        self._model.to(self._device)
        # The lengths are given: nothing of the checkpoint's own generation settings applies.
        self._model.generation_config = type(self._model.generation_config)(
            pad_token_id=0, eos_token_id=None, bos_token_id=None
        )

    def run(self, requests: Sequence[Request], temperature: float) -> list[int]:
        made: list[int] = []
        for start in range(0, len(requests), self.batch):
            made += self._run_batch(requests[start : start + self.batch], temperature)
        return made

    def _run_batch(self, requests: Sequence[Request], temperature: float) -> list[int]:
        import torch

        width = max(len(r.prompt_token_ids) for r in requests)
        ids = torch.zeros(len(requests), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(requests):
            length = len(request.prompt_token_ids)
            ids[row, width - length :] = torch.tensor(request.prompt_token_ids)
            mask[row, width - length :] = 1
        sampling = {"do_sample": True, "temperature": temperature} if temperature else {}
        answers = max(r.n for r in requests)
        with torch.inference_mode():
            out = self._model.generate(
                input_ids=ids.to(self._device),
                attention_mask=mask.to(self._device),
                max_new_tokens=max(r.max_tokens for r in requests),
                num_return_sequences=answers,
                **(sampling or {"do_sample": False}),
            )
        new = out.shape[1] - width
        return [min(new, r.max_tokens) * min(answers, r.n) for r in requests]


Peer = type[Transformers] | type[LlamaCpp] | type[OpenVino]
PEERS: dict[str, Peer] = {
    "llama-cpp": LlamaCpp,
    "transformers": Transformers,
    "openvino": OpenVino,
}


def peer_types(names: str) -> list[Peer]:
    """ "a,b" -> the classes of the peers.

    Raises:
        ValueError: an unknown peer.
    """
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    for name in chosen:
        if name not in PEERS:
            raise ValueError(f"there is no peer {name!r}; choose from {', '.join(PEERS)}")
    return [PEERS[name] for name in chosen]


def check_installed(peers: Sequence[Peer]) -> None:
    """Before anything slow.

    Raises:
        ModuleNotFoundError: a peer that is not there, with what installs it.
    """
    for peer in peers:
        missing = [package for package in peer.packages if find_spec(package) is None]
        if missing:
            raise ModuleNotFoundError(
                f"the peer {peer.name!r} needs {' and '.join(missing)}: "
                f"pip install 'rooftile[{peer.extra}]'"
            )
