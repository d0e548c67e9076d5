"""A stand-in for the engine: says what it was asked, keeps what it was given, loads nothing."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from rooftile.cli.options import EngineOptions
from rooftile.engine.outputs import (
    CompletionOutput,
    RequestMetrics,
    RequestOutput,
    TokenLogprobs,
)
from rooftile.engine.params import BeamSearchParams, SamplingParams

if TYPE_CHECKING:
    from rooftile.engine.params import Params


class FakeLLM:
    """Answers "re: <prompt>", word by word in streams.

    The prompt "fail" ends in an error, "refuse" is refused; runs finish in pairs, latest first.
    """

    model_name = "fake"
    sampling_defaults: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, template: bool = True) -> None:
        self.tokenizer = SimpleNamespace(has_chat_template=template)
        self.model_config = SimpleNamespace(vocab_size=5000)
        self.options: EngineOptions | None = None
        self.seed: int | None = None
        self.params: list[Any] = []
        self.conversations: list[list[dict[str, str]]] = []
        self.prompts: list[Any] = []
        self.aborted = 0
        self.interrupt_at: int | None = None  # press ctrl-C before this word of the next answer
        self.refuse: str | None = None  # the next prompt is refused with this message

    def stats(self) -> Any:
        return SimpleNamespace(generation_tokens=2 * len(self.prompts))

    def render_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        self.conversations.append([dict(m) for m in messages])
        return [len(self.conversations) - 1]

    def _text(self, prompt: Any) -> str:
        if isinstance(prompt, str):
            return prompt
        known = prompt[0] < len(self.conversations)
        return self.conversations[prompt[0]][-1]["content"] if known else f"tokens {prompt}"

    def _output(self, prompt: Any, n: int) -> RequestOutput:
        metrics = RequestMetrics(arrival=0.0, first_token=0.25, finished=1.0)
        answers = [
            CompletionOutput(i, f"re: {self._text(prompt)}", [1, 2], "stop") for i in range(n)
        ]
        for answer in answers:
            answer.logprobs = [TokenLogprobs(1, -0.5, ((1, -0.5),))]
            if self._text(prompt) == "fail":
                answer.text, answer.finish_reason, answer.error = "", "error", "it broke"
        return RequestOutput("0", None, [1, 2, 3], answers, metrics, num_cached_tokens=1)

    def generate(
        self, prompts: list[Any], params: list[SamplingParams], *, progress: bool = False
    ) -> list[RequestOutput]:
        self.prompts += prompts
        self.params += params
        outputs = [
            self._output(prompt, each.n) for prompt, each in zip(prompts, params, strict=True)
        ]
        for output, each in zip(outputs, params, strict=True):
            if each.prompt_logprobs is not None:
                output.prompt_logprobs = [
                    None,
                    TokenLogprobs(2, -0.25, ((2, -0.25), (3, -math.inf))),
                ]
        return outputs

    def beam_search(
        self, prompts: list[Any], params: list[BeamSearchParams], *, progress: bool = False
    ) -> list[RequestOutput]:
        self.prompts += prompts
        self.params += params
        return [self._found(prompt, each) for prompt, each in zip(prompts, params, strict=True)]

    def _found(self, prompt: Any, params: BeamSearchParams) -> RequestOutput:
        output = self._output(prompt, params.n_best)
        for answer in output.outputs:
            answer.logprobs = None
            answer.cumulative_logprob = -3.0 - answer.index
            answer.score = answer.cumulative_logprob / 2
        return output

    def run(
        self,
        requests: Iterable[tuple[Any, Params]],
        *,
        window: int | None = None,
        on_step: Callable[[], None] | None = None,
    ) -> Iterator[tuple[int, RequestOutput | ValueError]]:
        pair: list[tuple[int, RequestOutput | ValueError]] = []
        for position, (prompt, params) in enumerate(requests):
            self.prompts.append(prompt)
            self.params.append(params)
            pair.append((position, self._result(prompt, params)))
            if len(pair) == 2:
                yield from self._step(pair, on_step)
        yield from self._step(pair, on_step)

    def _step(
        self, pair: list[tuple[int, Any]], on_step: Callable[[], None] | None
    ) -> Iterator[tuple[int, Any]]:
        if on_step is not None:
            on_step()
        while pair:
            yield pair.pop()

    def _result(self, prompt: Any, params: Params) -> RequestOutput | ValueError:
        if self._text(prompt) == "refuse":
            return ValueError("the prompt has 9 tokens")
        if isinstance(params, BeamSearchParams):
            return self._found(prompt, params)
        output = self._output(prompt, params.n)
        if params.logprobs is None:
            for answer in output.outputs:
                answer.logprobs = None
        return output

    def stream(self, prompt: Any, params: SamplingParams) -> Iterator[RequestOutput]:
        self.prompts.append(prompt)
        self.params.append(params)
        if self.refuse is not None:
            message, self.refuse = self.refuse, None
            raise ValueError(message)
        return self._words(prompt)

    def _words(self, prompt: Any) -> Iterator[RequestOutput]:
        output = self._output(prompt, 1)
        (answer,) = output.outputs
        whole, answer.text = answer.text, ""
        try:
            for position, word in enumerate(whole.split(" ")):
                if position == self.interrupt_at:
                    self.interrupt_at = None
                    os.kill(os.getpid(), signal.SIGINT)
                answer.text += word if position == 0 else f" {word}"
                yield output
        except GeneratorExit:
            self.aborted += 1
            raise
        if not whole:
            yield output
