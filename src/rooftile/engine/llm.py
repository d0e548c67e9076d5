"""The synchronous face of the engine: generate, chat, stream."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from rooftile.engine.build import build_engine
from rooftile.engine.config import EngineConfig
from rooftile.engine.frontend import Frontend
from rooftile.engine.outputs import EngineStats, RequestOutput
from rooftile.engine.params import SamplingParams
from rooftile.models.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


class LLM:
    """A model with its engine, in this process.

    model: a GGUF file, a directory in Hugging Face format, a hub id, or "demo".
    options: the fields of `EngineConfig`.
    on_progress: called while loading with (what is being done, share done from 0 to 1).

    Not thread-safe: use it from one thread, or use `AsyncLLM`.

    Raises:
        ValueError: a model that cannot be read, or an option outside its range.
    """

    def __init__(
        self,
        model: str,
        *,
        on_progress: Callable[[str, float], None] | None = None,
        **options: Any,
    ) -> None:
        self.config = EngineConfig.build(model, **options)
        loaded, self._core = build_engine(self.config, on_progress)
        self.model_name = loaded.name
        self.model_config = loaded.config
        self.tokenizer: Tokenizer | None = loaded.tokenizer
        self._frontend = Frontend(loaded.tokenizer, self._core.limits)
        self._ids = map(str, itertools.count())

    @property
    def max_model_len(self) -> int:
        return self._core.limits.max_model_len

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Continue each prompt; results in the order of the prompts.

        prompts: a string, a list of token ids, or a list of either. params: one for all, or one
        for each. Every prompt is checked before any is run.

        Raises:
            ValueError: a prompt or parameter that cannot run, named with its limit.
        """
        many = _as_prompts(prompts)
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(many)
        if len(params) != len(many):
            raise ValueError(f"{len(params)} SamplingParams for {len(many)} prompts; give one each")
        outputs = self._add(many, params)
        try:
            with _progress_bar(len(outputs)) if progress else nullcontext() as advance:
                while not all(output.finished for output in outputs):
                    for output in self._step():
                        if advance is not None and output.finished:
                            advance(output)
        finally:
            self._abort_unfinished(outputs)
        return outputs

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of several, through the model's own chat template.

        Raises:
            ValueError: the model has no chat template, or the template refuses the messages.
        """
        single = not messages or isinstance(messages[0], Mapping)
        conversations: Any = [messages] if single else messages
        prompts = [self.render_chat(c, **template_options) for c in conversations]
        return self.generate(prompts, params, progress=progress)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Yield the same, growing RequestOutput whenever its text or tokens changed.

        Ending the iteration early aborts the request.
        """
        (output,) = self._add([prompt], [params or SamplingParams()])
        return self._follow(output)

    def _follow(self, output: RequestOutput) -> Iterator[RequestOutput]:
        seen = 0
        try:
            while not output.finished:
                self._step()
                progress = sum(len(c.token_ids) + c.finished for c in output.outputs)
                if progress != seen:
                    seen = progress
                    yield output
        finally:
            self._abort_unfinished([output])

    def render_chat(self, messages: Sequence[Message], **template_options: Any) -> list[int]:
        """The token ids of a conversation, ready for the model's answer."""
        return self._frontend.render_chat(messages, **template_options)

    def stats(self) -> EngineStats:
        return self._core.stats()

    def reset_prefix_cache(self) -> None:
        """Forget the KV of finished requests."""
        self._core.reset_prefix_cache()

    def _add(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]
    ) -> list[RequestOutput]:
        encoded = [self._frontend.encode(prompt) for prompt in prompts]
        for number, ((_, ids), each) in enumerate(zip(encoded, params, strict=True)):
            try:
                self._frontend.check(ids, each)
            except ValueError as error:
                where = f"prompt {number}: " if len(prompts) > 1 else ""
                raise ValueError(f"{where}{error}") from None
        outputs = []
        for (text, ids), each in zip(encoded, params, strict=True):
            request_id = next(self._ids)
            outputs.append(self._frontend.open(request_id, text, ids, each))
            self._core.add_request(request_id, ids, each)
        return outputs

    def _step(self) -> list[RequestOutput]:
        changed = []
        for delta in self._core.step():
            output, stopped = self._frontend.apply(delta)
            if stopped:
                self._core.finish(delta.request_id, delta.index)
            if output is not None:
                changed.append(output)
        return changed

    def _abort_unfinished(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            if not output.finished:
                self._core.finish(output.request_id)
                self._frontend.abort(output.request_id)


def _as_prompts(prompts: Any) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    items = list(prompts)
    single = (
        bool(items) and not isinstance(items[0], str | Sequence) and not hasattr(items[0], "shape")
    )
    return [items] if single else items


class _progress_bar:
    """A rich bar over finished requests, with output tokens a second."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._tokens = 0

    def __enter__(self) -> Callable[[RequestOutput], None]:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
        )

        self._progress = Progress(
            TextColumn("generating"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[tokens]} tokens"),
            console=Console(stderr=True),  # standard output is the caller's
        )
        self._progress.start()
        self._task = self._progress.add_task("", total=self._total, tokens=0)
        return self._advance

    def _advance(self, output: RequestOutput) -> None:
        self._tokens += sum(len(completion.token_ids) for completion in output.outputs)
        self._progress.update(self._task, advance=1, tokens=self._tokens)

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
