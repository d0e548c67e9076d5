"""The engine's loop over token ids: schedule, run, sample, collect. It knows no text."""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from rooftile.engine.beam import BeamSearch
from rooftile.engine.config import EngineConfig
from rooftile.engine.device_runner import DeviceRunner
from rooftile.engine.limits import Limits
from rooftile.engine.outputs import EngineStats, FinishReason, TokenLogprobs
from rooftile.engine.params import BeamSearchParams, Params, SamplingParams
from rooftile.engine.request import Request, Sequence
from rooftile.engine.runner import Runner
from rooftile.engine.scheduled_step import ScheduledStep
from rooftile.engine.scheduler import Scheduler
from rooftile.engine.step import StepOutput
from rooftile.kvcache.cache import KVCache

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class SequenceDelta:
    """News of one sequence: a message from the engine's loop to whoever makes text of it."""

    request_id: str
    index: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: str | None = None
    num_cached_tokens: int = 0
    scheduled: float | None = None  # when the request's first step began
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of the next prompt tokens
    cumulative_logprob: float | None = None  # of a beam
    score: float | None = None  # of a beam


NOT_FINITE = (
    "no token could be sampled: the logits, of the model or after logits_processor, are not finite "
    "(NaN or infinite)"
)


@dataclass(frozen=True)
class InFlight:
    plan: ScheduledStep
    result: Callable[[], StepOutput]


class EngineCore:
    def __init__(
        self,
        config: EngineConfig,
        runner: Runner | DeviceRunner,
        cache: KVCache,
        limits: Limits,
        eos_token_ids: frozenset[int],
    ) -> None:
        self.limits = limits
        self._runner = runner
        self._cache = cache
        assert config.max_num_batched_tokens is not None  # build_engine resolves the defaults
        assert config.pipeline_depth is not None
        self._scheduler = Scheduler(cache, config.max_num_batched_tokens, config.max_num_seqs)
        self._eos_token_ids = eos_token_ids
        self._depth = config.pipeline_depth
        self._in_flight: deque[InFlight] = deque()
        self._requests: dict[str, Request] = {}
        self._num_arrivals = 0
        self._num_steps = 0
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._seeds = random.Random(config.seed)

    # ------------------------------------------------------------------ requests

    def add_request(
        self,
        request_id: str,
        prompt_ids: list[int],
        params: Params,
        cache_salt: Hashable = None,
        score_from: int | None = None,
    ) -> None:
        """Queue a request.

        score_from: where prompt_logprobs begin, if not with the second token; the prefix cache is
            read up to there, and the tokens from there on are a continuation, not the prompt's.

        Raises:
            ValueError: what `Limits.check` refuses, or an id that is in use.
        """
        if request_id in self._requests:
            raise ValueError(f"request id {request_id!r} is in use; choose another")
        self.limits.check(prompt_ids, params)
        longest = self.limits.max_model_len - len(prompt_ids)
        max_new = longest if params.max_tokens is None else min(longest, params.max_tokens)
        eos: frozenset[int] = frozenset() if params.ignore_eos else self._eos_token_ids
        beam = None
        if isinstance(params, BeamSearchParams):
            beam = BeamSearch(params, eos, max_new)
            count = min(beam.candidates_per_beam, self.limits.vocab_size)
            params = SamplingParams(temperature=0, max_tokens=params.max_tokens, logprobs=count)
        request = Request(
            request_id,
            self._num_arrivals,
            prompt_ids,
            params,
            seed=self._seeds.getrandbits(63) if params.seed is None else params.seed,
            max_new_tokens=max_new,
            stop_token_ids=eos | frozenset(params.stop_token_ids),
            cache_root=cache_salt,
            beam=beam,
            score_next=score_from or 1,
            context_len=score_from or len(prompt_ids),
        )
        self._num_arrivals += 1
        self._prompt_tokens += len(prompt_ids)
        self._requests[request_id] = request
        self._scheduler.add(request)

    def finish(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one of its sequences, from outside (abort, stop string). Idempotent."""
        request = self._requests.get(request_id)
        if request is None:
            return
        for sequence in request.sequences if index is None else [request.sequences[index]]:
            if not sequence.finished:
                self._finish(sequence, "abort")

    @property
    def has_unfinished(self) -> bool:
        return self._scheduler.has_unfinished or bool(self._in_flight)

    def reset_prefix_cache(self) -> None:
        self._cache.reset_prefix()

    def stats(self) -> EngineStats:
        tables = [s.table for r in self._scheduler.running for s in r.sequences]
        entries = sum(table.num_pages for table in tables if table)
        return EngineStats(
            kv=self._cache.stats(),
            page_table_entries=entries,
            kv_tokens=self.limits.kv_tokens,
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            num_steps=self._num_steps,
            num_preemptions=self._scheduler.num_preemptions,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
        )

    # ------------------------------------------------------------------ the loop

    def step(self) -> list[SequenceDelta]:
        """Launch a step if one can run, and collect the oldest when the pipeline is full."""
        launched = False
        if len(self._in_flight) < self._depth and self._scheduler.has_unfinished:
            plan = self._scheduler.schedule(self._num_steps)
            if plan is not None:
                launched = True
                self._num_steps += 1
                try:
                    result = self._runner.launch(plan.input)
                except Exception as error:
                    return self._fail(plan, error)
                except BaseException:  # ctrl-C: the step is void, and its requests can go on
                    self._void(plan)
                    raise
                self._in_flight.append(InFlight(plan, result))
        if self._in_flight and (not launched or len(self._in_flight) == self._depth):
            return self._collect(self._in_flight.popleft())
        if not launched and self._scheduler.has_unfinished:
            # Alone in all of the pages: it ends with what it has, so that the engine never stands still.
            sequence = self._scheduler.stuck_sequence()
            if sequence.request.beam is not None:
                return self._end_beams(sequence.request, cut=True)
            return [self._finish(sequence, "length")]
        return []

    def _collect(self, flight: InFlight) -> list[SequenceDelta]:
        plan = flight.plan
        try:
            output = flight.result()
        except Exception as error:
            return self._fail(plan, error)
        except BaseException:
            self._void(plan)
            raise
        # Before anything is released: only ready pages stay cached.
        self._cache.complete(plan.input.step)
        requests = plan.requests
        for request in requests:
            request.suspect = False
        deltas = [
            SequenceDelta(request.request_id, 0, prompt_logprobs=tuple(logprobs))
            for request, logprobs in zip(plan.scored, output.prompt_logprobs, strict=True)
            if not request.finished
        ]
        for at, (sequence, token, logprobs) in enumerate(
            zip(plan.sampled, output.token_ids, output.logprobs, strict=True)
        ):
            sequence.num_pending -= 1
            if sequence.finished:  # an overrun past a stop, which is dropped
                continue
            if token < 0:
                deltas += self._refuse(sequence, output.errors.get(at, NOT_FINITE))
            elif sequence.request.beam is not None:
                assert logprobs is not None
                sequence.candidates = logprobs.top
            else:
                deltas.append(self._append(sequence, token, logprobs))
        for request in requests:
            if (request.beam is None and request.max_new_tokens) or request.finished:
                continue
            if request.beam is not None:
                deltas += self._advance_beams(request)
            else:
                deltas += self._end_scored(request)
        return deltas

    def _append(
        self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None
    ) -> SequenceDelta:
        request = sequence.request
        token_ids = sequence.token_ids
        token_ids.append(token)
        self._generation_tokens += 1
        delta = SequenceDelta(
            request.request_id,
            sequence.index,
            (token,),
            (logprobs,),
            num_cached_tokens=request.num_cached_tokens or 0,
            scheduled=request.scheduled,
        )
        if token in request.stop_token_ids:
            self._end(sequence, "stop")
            delta.finish_reason, delta.stop_token_id = "stop", token
        elif len(token_ids) - len(request.prompt_ids) == request.max_new_tokens:
            self._end(sequence, "length")
            delta.finish_reason = "length"
        return delta

    def _refuse(self, sequence: Sequence, error: str) -> list[SequenceDelta]:
        """End a sequence with an error, and with a beam its whole search."""
        if sequence.request.beam is not None:
            return self._refuse_request(sequence.request, error)
        return [self._finish(sequence, "error", error=error)]

    def _refuse_request(self, request: Request, error: str) -> list[SequenceDelta]:
        running = [sequence for sequence in request.sequences if not sequence.finished]
        deltas = [self._finish(sequence, "error", error=error) for sequence in running]
        if request.beam is None:
            return deltas
        return [
            SequenceDelta(request.request_id, index, finish_reason="error", error=error)
            for index in range(request.beam.n_best)
        ]

    def _end_scored(self, request: Request) -> list[SequenceDelta]:
        """A request without new tokens ends with the step that computes the end of its prompt."""
        computed = request.sequences[0].num_computed
        # num_computed runs ahead of the values while a later step is in flight.
        in_flight = any(request in flight.plan.requests for flight in self._in_flight)
        if computed < request.num_prompt_tokens or in_flight:
            return []
        return [self._finish(sequence, "length") for sequence in request.sequences]

    def _advance_beams(self, request: Request) -> list[SequenceDelta]:
        """Once every beam knows its candidates: the next beams, or the end."""
        assert request.beam is not None
        candidates = [s.candidates for s in request.sequences if s.candidates is not None]
        if len(candidates) < len(request.sequences):
            return []
        outputs = [sequence.output_ids for sequence in request.sequences]
        continuations = request.beam.advance(outputs, candidates)
        self._generation_tokens += len(continuations)
        if not continuations:
            return self._end_beams(request)
        self._scheduler.replace_beams(request, continuations)
        return []

    def _end_beams(self, request: Request, cut: bool = False) -> list[SequenceDelta]:
        """The best hypotheses as this request's sequences; `cut` counts running ones as finished."""
        assert request.beam is not None
        running = [sequence.output_ids for sequence in request.sequences] if cut else []
        for sequence in request.sequences:
            self._finish(sequence, "length")
        deltas = []
        results = request.beam.results(running)
        for index, best in enumerate(results):
            ended = best.token_ids[-1] in request.stop_token_ids
            deltas.append(
                SequenceDelta(
                    request.request_id,
                    index,
                    best.token_ids,
                    (None,) * len(best.token_ids),
                    finish_reason="stop" if ended else "length",
                    stop_token_id=best.token_ids[-1] if ended else None,
                    num_cached_tokens=request.num_cached_tokens or 0,
                    scheduled=request.scheduled,
                    cumulative_logprob=best.logprob,
                    score=best.score,
                )
            )
        error = f"the search found only {len(results)} continuations"
        for index in range(len(results), request.beam.n_best):
            deltas.append(
                SequenceDelta(request.request_id, index, finish_reason="error", error=error)
            )
        return deltas

    def _delta(self, sequence: Sequence, **news: object) -> SequenceDelta:
        request = sequence.request
        return SequenceDelta(
            request.request_id,
            sequence.index,
            finish_reason=sequence.finish_reason,
            num_cached_tokens=request.num_cached_tokens or 0,
            scheduled=request.scheduled,
            **news,  # type: ignore[arg-type]
        )

    def _finish(self, sequence: Sequence, reason: FinishReason, **news: object) -> SequenceDelta:
        self._end(sequence, reason)
        return self._delta(sequence, **news)

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        self._scheduler.finish(sequence, reason)
        if sequence.request.finished:
            del self._requests[sequence.request.request_id]

    def _fail(self, plan: ScheduledStep, error: Exception) -> list[SequenceDelta]:
        """A step raised. Its requests are tried again, alone; one that was alone ends."""
        requests = self._void(plan)
        logger.warning(
            "step %d with %d tokens of %d requests failed: %s: %s",
            *(plan.input.step, plan.num_tokens, len(plan.requests), type(error).__name__, error),
            exc_info=error,
        )
        if len(requests) != 1:
            return []
        message = f"the step failed: {type(error).__name__}: {error}"
        return self._refuse_request(requests[0], message)

    def _void(self, plan: ScheduledStep) -> list[Request]:
        """Take a step back. Steps after it read what it should have written, so they go too."""
        later = [
            flight.plan for flight in self._in_flight if flight.plan.input.step > plan.input.step
        ]
        self._in_flight = deque(f for f in self._in_flight if f.plan not in later)
        for failed in reversed(later):
            self._scheduler.fail(failed)
        return self._scheduler.fail(plan)
