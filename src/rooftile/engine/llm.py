"""The synchronous face of the engine: generate, chat, stream."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rooftile.engine.build import build_engine
from rooftile.engine.config import EngineConfig
from rooftile.engine.frontend import Frontend
from rooftile.engine.outputs import EngineStats, RequestOutput, Score
from rooftile.engine.params import BeamSearchParams, Params, SamplingParams
from rooftile.models.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


class LLM:
    """A model with its engine, in this process.

    model: a GGUF file, a directory in Hugging Face format, a hub id, or "demo".
    options: the fields of `EngineConfig`.
    on_progress: called while loading with (what is being done, share done from 0 to 1).

    sampling_defaults: the fields of SamplingParams that the model's files recommend. They hold where a
    request has no params; `SamplingParams(**llm.sampling_defaults, max_tokens=40)` has them too.
    Params that are given count as they are.

    Not thread-safe: use it from one thread, or use `AsyncLLM`.

    Raises:
        ValueError: a model that cannot be read, or an option outside its range.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        on_progress: Callable[[str, float], None] | None = None,
        **options: Any,
    ) -> None:
        config = EngineConfig.build(model, **options)
        self.config = config.resolved(config.device_type)
        loaded, self._core = build_engine(self.config, on_progress)
        self.model_name = loaded.name
        self.model_config = loaded.config
        self.tokenizer: Tokenizer | None = loaded.tokenizer
        self.sampling_defaults: dict[str, Any] = dict(loaded.sampling_defaults)
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
        for each; None samples as the model's files recommend. Every prompt is checked before any runs.

        Raises:
            ValueError: a prompt or parameter that cannot run, named with its limit.
        """
        many = _as_prompts(prompts)
        if not isinstance(params, Sequence):
            params = [self._or_default(params)] * len(many)
        return self._finish_all(self._add(many, params), progress)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams | Sequence[BeamSearchParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """The n_best continuations of each prompt by beam search, best first, with their scores.

        prompts, params: as `generate` takes them. Beams share pages and copy the last one only when
        they write to it.

        Raises:
            ValueError: a prompt or parameter that cannot run, named with its limit.
        """
        many = _as_prompts(prompts)
        if not isinstance(params, Sequence):
            params = [BeamSearchParams() if params is None else params] * len(many)
        for each in params:
            if not isinstance(each, BeamSearchParams):
                raise ValueError(f"beam_search takes BeamSearchParams, not {each!r:.80}")
        return self._finish_all(self._add(many, params), progress)

    def score(self, context: Prompt, continuations: Prompt | Sequence[Prompt]) -> list[Score]:
        """The log-probabilities of each continuation after the same context.

        continuations: a string, a list of token ids, or a list of either. The context is computed once;
        its pages are shared. Text is tokenised piece by piece.

        Raises:
            ValueError: an empty context or continuation, or one that is too long.
        """
        _, context_ids = self._frontend.encode(context)
        if not context_ids:
            raise ValueError("the context is empty; give at least one token")
        pieces = [
            self._frontend.encode(c, add_special_tokens=False)[1]
            for c in _as_prompts(continuations)
        ]
        if not all(pieces):
            raise ValueError("a continuation is empty; give at least one token")
        params = SamplingParams(max_tokens=0, prompt_logprobs=1)
        outputs = self._finish_all(
            self._add(
                [context_ids + piece for piece in pieces],
                [params] * len(pieces),
                score_from=len(context_ids),
            )
        )
        scores = []
        for output, piece in zip(outputs, pieces, strict=True):
            (completion,) = output.outputs
            if completion.error is not None:
                raise RuntimeError(completion.error)
            entries = [entry for entry in output.prompt_logprobs or [] if entry is not None]
            greedy = all(entry.top[0][0] == entry.token_id for entry in entries)
            scores.append(Score(tuple(piece), tuple(e.logprob for e in entries), greedy))
        return scores

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
        given: Any = list(messages)
        single = not given or isinstance(given[0], Mapping)
        conversations = [given] if single else given
        prompts = [self.render_chat(c, **template_options) for c in conversations]
        return self.generate(prompts, params, progress=progress)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Yield the same, growing RequestOutput whenever its text or tokens changed.

        Ending the iteration early aborts the request.
        """
        (output,) = self._add([prompt], [self._or_default(params)])
        return self._follow(output)

    def _or_default(self, params: SamplingParams | None) -> SamplingParams:
        return SamplingParams(**self.sampling_defaults) if params is None else params

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

    def run(
        self,
        requests: Iterable[tuple[Prompt, Params]],
        *,
        window: int | None = None,
        on_step: Callable[[], None] | None = None,
    ) -> Iterator[tuple[int, RequestOutput | ValueError]]:
        """Run any number of requests in bounded memory; yield each with its position as it finishes.

        requests: (prompt, SamplingParams or BeamSearchParams), however many. The next ones are asked
            for between steps, when fewer than `window` are open, so it should not wait for anything.
        window: most requests that are open at once; None: max_num_seqs, which keeps the batch full.
        on_step: called after each step. What it raises ends the run.

        A request that is none, or cannot run, comes out as the ValueError that says why, and the others go on.
        Ending the iteration early aborts what is open.

        Raises:
            ValueError: a window below 1.
        """
        if window is None:
            window = self.config.max_num_seqs
        if window < 1:
            raise ValueError(f"window is {window}; it must be at least 1")
        return self._run(enumerate(requests), window, on_step)

    def _run(
        self,
        requests: Iterator[tuple[int, tuple[Prompt, Params]]],
        window: int,
        on_step: Callable[[], None] | None,
    ) -> Iterator[tuple[int, RequestOutput | ValueError]]:
        running: dict[int, RequestOutput] = {}
        try:
            while True:
                while len(running) < window and (asked := next(requests, None)) is not None:
                    position, request = asked
                    try:
                        prompt, params = _as_pair(request)
                        (running[position],) = self._add([prompt], [params])
                    except ValueError as error:
                        yield position, error
                if not running:
                    return
                self._step()
                if on_step is not None:
                    on_step()
                for position in [p for p, output in running.items() if output.finished]:
                    yield position, running.pop(position)
        finally:
            self._abort_unfinished(list(running.values()))

    def render_chat(self, messages: Sequence[Message], **template_options: Any) -> list[int]:
        """The token ids of a conversation, ready for the model's answer."""
        return self._frontend.render_chat(messages, **template_options)

    def stats(self) -> EngineStats:
        return self._core.stats()

    def reset_prefix_cache(self) -> None:
        """Forget the KV of finished requests."""
        self._core.reset_prefix_cache()

    def _add(
        self, prompts: Sequence[Prompt], params: Sequence[Params], score_from: int | None = None
    ) -> list[RequestOutput]:
        if len(params) != len(prompts):
            raise ValueError(f"{len(params)} params for {len(prompts)} prompts; give one each")
        encoded = [self._frontend.encode(prompt) for prompt in prompts]
        prepared = []
        for number, ((_, ids), each) in enumerate(zip(encoded, params, strict=True)):
            try:
                prepared.append(self._frontend.prepare(ids, each))
            except ValueError as error:
                where = f"prompt {number}: " if len(prompts) > 1 else ""
                raise ValueError(f"{where}{error}") from None
        outputs: list[RequestOutput] = []
        try:
            for (text, ids), each in zip(encoded, prepared, strict=True):
                request_id = next(self._ids)
                outputs.append(self._frontend.open(request_id, text, ids, each, score_from or 1))
                self._core.add_request(request_id, ids, each, score_from=score_from)
        except BaseException:  # ctrl-C among many prompts: nobody would wait for the first ones
            self._abort_unfinished(outputs)
            raise
        return outputs

    def _finish_all(
        self, outputs: list[RequestOutput], progress: bool = False
    ) -> list[RequestOutput]:
        try:
            with _progress_bar(len(outputs)) if progress else nullcontext() as advance:
                while not all(output.finished for output in outputs):
                    for output in self._step():
                        if advance is not None and output.finished:
                            advance(output)
        finally:
            self._abort_unfinished(outputs)
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


def _as_pair(request: Any) -> tuple[Prompt, Params]:
    if not isinstance(request, tuple | list) or len(request) != 2:
        raise ValueError(f"a request is a pair of a prompt and SamplingParams, not {request!r:.80}")
    prompt, params = request
    return prompt, params


def _as_prompts(prompts: Any) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    try:
        items = list(prompts)
    except TypeError:
        items = None
    if items is None or isinstance(prompts, bytes | bytearray | Mapping | Set):
        raise ValueError(
            f"prompts are a string, a list of token ids, or a list of either, not {prompts!r:.80}"
        )
    single = (
        bool(items)
        and not isinstance(items[0], str | Sequence)
        and not getattr(items[0], "ndim", 0)  # the rows of an array are prompts, its numbers tokens
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
