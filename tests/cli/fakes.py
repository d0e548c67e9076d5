"""A stand-in for the engine: says what it was asked, keeps what it was given, loads nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from rooftile.cli.options import EngineOptions
from rooftile.engine.outputs import (
    CompletionOutput,
    RequestMetrics,
    RequestOutput,
    TokenLogprobs,
)
from rooftile.engine.params import SamplingParams


class FakeLLM:
    """Answers "re: <prompt>", word by word in streams. The prompt "fail" ends in an error."""

    model_name = "fake"

    def __init__(self, template: bool = True) -> None:
        self.tokenizer = SimpleNamespace(has_chat_template=template)
        self.model_config = SimpleNamespace(vocab_size=5000)
        self.options: EngineOptions | None = None
        self.seed: int | None = None
        self.params: list[SamplingParams] = []
        self.conversations: list[list[dict[str, str]]] = []
        self.prompts: list[Any] = []
        self.aborted = 0
        self.interrupt_at: int | None = None  # press ctrl-C before this word of the next answer
        self.refuse: str | None = None  # the next prompt is refused with this message

    def render_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        self.conversations.append([dict(m) for m in messages])
        return [len(self.conversations) - 1]

    def _text(self, prompt: Any) -> str:
        return prompt if isinstance(prompt, str) else self.conversations[prompt[0]][-1]["content"]

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
        self, prompts: list[Any], params: SamplingParams, *, progress: bool = False
    ) -> list[RequestOutput]:
        self.prompts += prompts
        self.params.append(params)
        return [self._output(prompt, params.n) for prompt in prompts]

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
