"""From prompts to token ids, and from the engine's deltas to texts: everything about strings.

It runs on the caller's side (LLM's own thread, AsyncLLM's event loop), never on the engine's loop.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from operator import index
from typing import Any

from rooftile.engine.bad_words import BadWords, spellings
from rooftile.engine.core import SequenceDelta
from rooftile.engine.detokenizer import IncrementalDecoder, StopStrings
from rooftile.engine.limits import Limits
from rooftile.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from rooftile.engine.params import BeamSearchParams, Params, SamplingParams
from rooftile.models.tokenizer import Tokenizer


class TextState:
    """The growing text of one continuation."""

    def __init__(
        self,
        output: CompletionOutput,
        params: SamplingParams,
        decoder: IncrementalDecoder | None,
    ) -> None:
        self.output = output
        self._params = params
        self._decoder = decoder
        self._stops = StopStrings(params.stop_strings)
        self._text = ""  # all of it; output.text may lag behind, never ahead of a possible stop

    def apply(self, delta: SequenceDelta) -> bool:
        """Take the delta in; True if a stop string ended the text (the engine must be told)."""
        output = self.output
        if self._decoder is None:  # no text, so no stop strings either
            self._take_tokens(delta)
            return False
        new_from = len(self._text)
        for token in delta.token_ids:
            if token != delta.stop_token_id:
                self._text += self._decoder.push(token)
        if delta.finish_reason is not None:
            self._text += self._decoder.flush()
        self._take_tokens(delta)
        found = None
        if len(output.token_ids) >= self._params.min_tokens:
            found = self._stops.find(self._text, new_from)
        if found is not None:
            at, output.stop_reason = found
            if self._params.include_stop_str_in_output:
                at += len(output.stop_reason)
            output.text = self._text = self._text[:at]
            output.finish_reason = "stop"
            return delta.finish_reason is None
        finished = output.finish_reason is not None
        output.text = self._text[: None if finished else self._stops.safe_length(self._text)]
        return False

    def _take_tokens(self, delta: SequenceDelta) -> None:
        output = self.output
        output.token_ids += delta.token_ids
        for logprobs in delta.logprobs:
            if logprobs is not None:
                assert output.logprobs is not None
                output.logprobs.append(logprobs)
                output.cumulative_logprob = (output.cumulative_logprob or 0.0) + logprobs.logprob
        output.finish_reason = delta.finish_reason
        output.error = delta.error
        if delta.score is not None:
            output.cumulative_logprob, output.score = delta.cumulative_logprob, delta.score
        if delta.stop_token_id is not None and delta.stop_token_id in self._params.stop_token_ids:
            output.stop_reason = delta.stop_token_id


class RequestState:
    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_ids: list[int],
        params: SamplingParams,
        tokenizer: Tokenizer | None,
    ) -> None:
        self.output = RequestOutput(
            request_id,
            prompt,
            prompt_ids,
            [CompletionOutput(i) for i in range(params.n)],
            RequestMetrics(arrival=time.monotonic()),
        )
        if params.logprobs is not None:
            for completion in self.output.outputs:
                completion.logprobs = []

        def decode(ids: Sequence[int]) -> str:
            assert tokenizer is not None
            return tokenizer.decode(list(ids), skip_special_tokens=params.skip_special_tokens)

        hidden: Set[int] = frozenset()
        if tokenizer is not None and params.skip_special_tokens:
            hidden = tokenizer.special_ids
        self.texts = [
            TextState(
                completion,
                params,
                None if tokenizer is None else IncrementalDecoder(decode, prompt_ids, hidden),
            )
            for completion in self.output.outputs
        ]


class Frontend:
    """Keeps the text state of every open request."""

    def __init__(self, tokenizer: Tokenizer | None, limits: Limits) -> None:
        self.tokenizer = tokenizer
        self.limits = limits
        self._open: dict[str, RequestState] = {}

    def encode(
        self, prompt: str | Sequence[int], add_special_tokens: bool = True
    ) -> tuple[str | None, list[int]]:
        """(text or None, token ids).

        Raises:
            ValueError: text without a tokenizer, text that is not valid Unicode, wrong types.
        """
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("this model has no tokenizer; give the prompt as token ids")
            return prompt, self.tokenizer.encode(prompt, add_special_tokens)
        # What these give when iterated over is not what was meant.
        if not isinstance(prompt, bytes | bytearray | Mapping | Set):
            try:
                return None, [index(token) for token in prompt]
            except TypeError:
                pass
        raise ValueError(f"a prompt is a string or a list of token ids, not {prompt!r:.80}")

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """The token ids of a conversation, through the model's own chat template.

        Raises:
            ValueError: no tokenizer or template, or the template refuses the messages.
        """
        if self.tokenizer is None:
            raise ValueError("this model has no tokenizer, so it cannot chat")
        text = self.tokenizer.render_chat(messages, **options)
        return self.tokenizer.encode(text, add_special_tokens=False)

    def prepare(self, prompt_ids: list[int], params: Params) -> Params:
        """Check a request; returns its parameters with words turned into tokens.

        Raises:
            ValueError: what `Limits.check` refuses; words without a tokenizer; not parameters.
        """
        if not isinstance(params, SamplingParams | BeamSearchParams):
            raise ValueError(
                f"a request takes SamplingParams or BeamSearchParams, not {params!r:.80}"
            )
        self.limits.check(prompt_ids, params)
        if isinstance(params, BeamSearchParams):
            return params
        if params.stop_strings and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer, which this model does not have")
        if not params.bad_words:
            return params
        if self.tokenizer is None:
            raise ValueError("bad_words need a tokenizer, which this model does not have")
        ban = BadWords(spellings(params.bad_words, self.tokenizer), params.logits_processor)
        return replace(params, bad_words=(), logits_processor=ban)

    def open(
        self,
        request_id: str,
        prompt: str | None,
        prompt_ids: list[int],
        params: Params,
        score_from: int = 1,
    ) -> RequestOutput:
        """Begin a request's texts. score_from: the first prompt token with a log-probability."""
        if isinstance(params, BeamSearchParams):
            params = SamplingParams(n=params.n_best, skip_special_tokens=params.skip_special_tokens)
        state = RequestState(request_id, prompt, prompt_ids, params, self.tokenizer)
        if params.prompt_logprobs is not None:
            state.output.prompt_logprobs = [None] * score_from
        self._open[request_id] = state
        return state.output

    def apply(self, delta: SequenceDelta) -> tuple[RequestOutput | None, bool]:
        """The request that changed, and whether the engine must be told to stop this sequence."""
        state = self._open.get(delta.request_id)
        if state is None:
            return None, False
        output = state.output
        completion = output.outputs[delta.index]
        if completion.finish_reason is not None:
            return None, False
        now = time.monotonic()
        if delta.token_ids and output.metrics.first_token is None:
            output.metrics.first_token = now
        output.metrics.scheduled = delta.scheduled or output.metrics.scheduled
        completion.token_times += [now] * len(delta.token_ids)
        if output.prompt_logprobs is not None:
            output.prompt_logprobs += delta.prompt_logprobs
        output.num_cached_tokens = max(output.num_cached_tokens, delta.num_cached_tokens)
        try:
            stopped = state.texts[delta.index].apply(delta)
        except Exception as error:  # whatever a model's tokenizer raises is this request's error
            completion.error = f"its text failed: {type(error).__name__}: {error}"
            completion.finish_reason, stopped = "error", delta.finish_reason is None
        if completion.finish_reason is not None and output.finished:
            self._close(delta.request_id, now)
        return output, stopped

    def abort(self, request_id: str) -> None:
        """Mark what is unfinished as aborted, and forget the request. Idempotent."""
        state = self._open.get(request_id)
        if state is None:
            return
        for completion in state.output.outputs:
            if not completion.finished:
                completion.finish_reason = "abort"
        self._close(request_id, time.monotonic())

    def _close(self, request_id: str, now: float) -> None:
        self._open.pop(request_id).output.metrics.finished = now
