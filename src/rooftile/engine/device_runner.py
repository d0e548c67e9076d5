"""Runs steps on a GPU: one copy of packed deltas, graphs of padded steps, results without waiting.

Everything also runs on a CPU, as it is and without graphs, which is how it is tested.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from rooftile.engine.graphs import Graphs, decode_sizes, fitting, mixed_sizes
from rooftile.engine.outputs import TokenLogprobs
from rooftile.engine.runner import SCORED_ROWS
from rooftile.engine.sampler import Sampler, logprob_tensors, read_logprobs
from rooftile.engine.scheduled_step import LEAST_COMMON
from rooftile.engine.staging import Staging, starts_of
from rooftile.engine.step import ScoreSlot, StepInput, StepOutput
from rooftile.engine.transfer import Readback, upload
from rooftile.kernels.weights_at_rest import weights_at_rest
from rooftile.kvcache.spec import KVGroup
from rooftile.kvcache.storage import KVStorage
from rooftile.layers.attention import LayerKV
from rooftile.layers.moe import MixtureOfExperts
from rooftile.models.decoder import Decoder
from rooftile.ops.attention_call import AttentionCall
from rooftile.ops.operator import GPU_FAMILIES
from rooftile.ops.paged import follows_plan
from rooftile.ops.prefixes import prefixes_of
from rooftile.ops.sampling import SAMPLE
from rooftile.ops.step import SAMPLE as SAMPLE_FIELDS
from rooftile.ops.step import StepState, StepTensors, prepare_step
from rooftile.types import AttentionPlan, PagedBatch

# In a step of decodes, bytes that shared prefixes spare reading in a layer, from which on this saves more
# time than the partial results of rows take: 60 microseconds, and more with more requests.
LEAST_SPARED, LEAST_SPARED_A_REQUEST = 1 << 27, 1 << 20
LEAST_SHARING = 8  # requests of a step
# Up to here every size of a decode step is run before the first is captured: they differ in kernels
# (few rows) and in what Triton compiles for (numbers that 16 divides, or not).
WARM_SIZES = 24


@dataclass(frozen=True)
class Shape:
    """Capacities of one forward pass. In a step of decodes alone no request has more than one token,
    and prefixes that requests share may be read once.
    """

    tokens: int
    requests: int
    max_q_len: int
    shares: bool = False

    @classmethod
    def decode(cls, requests: int, shares: bool = False) -> Shape:
        return cls(requests, requests, 1, shares)

    @classmethod
    def mixed(cls, tokens: int, requests: int) -> Shape:
        return cls(tokens, requests, tokens)


class DeviceRunner:
    """Owns what a sequence keeps on the device between steps, by stable row: its last token, its
    page-table row in each KV group, and its sampling state.

    A step is padded to the next capacity: requests without query tokens, tokens without a slot,
    samples for a spare row. Steps run in order on the current stream; `launch` never waits for the
    device, except for a logits processor.
    """

    def __init__(
        self,
        decoder: Decoder,
        groups: Sequence[KVGroup],
        *,
        page_size: int,
        max_rows: int,
        max_pages_per_row: int,
        max_tokens: int,
        device: torch.device,
    ) -> None:
        self._decoder = decoder
        self._page_size = page_size
        self._device = device
        self._max_kv_len = max_pages_per_row * page_size
        self._decode_sizes = decode_sizes(max_rows)
        self._mixed_sizes = mixed_sizes(max_tokens)
        tables = torch.zeros(
            len(groups), max_rows, max_pages_per_row, dtype=torch.int32, device=device
        )
        self._state = StepState(tables, torch.zeros(max_rows + 1, dtype=torch.int64, device=device))
        tokens = max(max_tokens, max_rows)
        self._tensors = StepTensors.empty(tokens, max_rows, max_rows, tables, device)
        self._staging = Staging(
            max_tokens=tokens,
            max_rows=max_rows,
            max_pages=max_pages_per_row,
            groups=len(groups),
            device=device,
        )
        self._sampler = Sampler(max_rows, decoder.config.vocab_size, device)
        self._readback = Readback(device)
        self._graphs = Graphs(device)
        self._storage: KVStorage | None = None
        self._calls: list[Hashable] = []  # of each layer's attention
        self._shared_bytes = 0
        self._sampled = torch.zeros(
            max_rows, decoder.config.hidden, dtype=decoder.dtype, device=device
        )
        self._tokens = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._prompt_lens: Tensor | None = None  # of each token's prompt, where the decoder asks
        if decoder.needs_lengths:
            self._prompt_lens = torch.zeros(tokens, dtype=torch.int64, device=device)

    # ------------------------------------------------------------------ before the first step

    @property
    def capacities(self) -> str:
        """What is captured, for people."""
        return (
            f"up to {self._decode_sizes[-1]} requests and {self._mixed_sizes[-1]} tokens in "
            f"{len(self._all_shapes())} sizes"
        )

    def cannot_capture(self) -> str | None:
        """Why steps of this model cannot be captured, or `None`."""
        for number, layer in enumerate(self._decoder.layers):
            operator = layer.attention.operator
            kernels = [(operator.name, operator.choose(self._calls[number]))]
            if isinstance(layer.mlp, MixtureOfExperts):
                kernels.append(layer.mlp.kernel)
            for name, family in kernels:
                if family not in GPU_FAMILIES:
                    return f"{name} runs on its kernel {family!r}, which reads lengths on the host"
        return None

    def attach(self, storage: KVStorage) -> None:
        """The pages to work on, from here on. Graphs that were captured on others are void."""
        self._storage = storage
        self._graphs = Graphs(self._device)
        self._calls = [
            layer.attention.call(self._sampled, *storage.layer(number))
            for number, layer in enumerate(self._decoder.layers)
        ]
        # Of a key in a layer whose kernel reads it once for all requests that share it; 0: none does.
        self._shared_bytes = max(
            (
                group.spec.bytes_per_token
                for group in storage.groups
                for call in [self._calls[layer] for layer in group.layers]
                if isinstance(call, AttentionCall) and call.left < 0 and follows_plan(call)
            ),
            default=0,
        )

    @property
    def _sharing_sizes(self) -> list[int]:
        """Capacities of decode steps in which prefixes may be read once."""
        return [n for n in self._decode_sizes if self._shared_bytes and n >= LEAST_SHARING]

    def warm_up(self) -> None:
        """Run the largest step and the largest draw, of padding alone, and small ones, which run other
        kernels: they are compiled, and libraries load what they need.
        """
        with torch.inference_mode():
            self._staging.send([], [], np.empty((0, len(SAMPLE_FIELDS)), np.int32))
        most = self._decode_sizes[-1]
        small = [n for n in self._decode_sizes if n <= WARM_SIZES]
        shapes = [Shape.mixed(self._mixed_sizes[-1], most), Shape.decode(small[0])]
        forwards = [partial(self._forward, shape) for shape in shapes]
        # Of those beside each other no two compile the same; the rest find it compiled.
        self._run_beside([partial(self._draw, most), *forwards])
        shapes = [Shape.decode(n) for n in (most, *small[1:4])]
        shapes += [
            Shape.decode(n, True) for n in {*self._sharing_sizes[:1], *self._sharing_sizes[-1:]}
        ]
        self._run_beside([partial(self._forward, shape) for shape in shapes])
        shapes = [Shape.mixed(self._mixed_sizes[0], most), *map(Shape.decode, small)]
        with torch.inference_mode():
            for shape in shapes:
                self._forward(shape)
            for size in small:
                self._draw(size)

    def _run_beside(self, parts: Sequence[Callable[[], object]]) -> None:
        """Run parts of steps on padding, on a GPU beside each other, for what they compile. What they
        write into shared tensors is padding, whoever comes last.
        """

        def run(part: Callable[[], object]) -> None:
            with torch.inference_mode():
                if self._device.type == "cuda":
                    torch.cuda.set_device(self._device)  # a thread begins with the first one
                part()

        with ThreadPoolExecutor(len(parts) if self._device.type == "cuda" else 1) as threads:
            for _ in threads.map(run, parts):
                pass

    def capture(self, report: Callable[[float], None] = lambda share: None) -> None:
        """Capture a graph for every capacity. report: told the share that is done."""
        parts: list[tuple[Hashable, Callable[[], object]]] = [
            (shape, partial(self._forward, shape)) for shape in self._all_shapes()
        ]
        parts += [(n, partial(self._draw, n)) for n in reversed(self._decode_sizes)]
        with torch.inference_mode():
            self._staging.send([], [], np.empty((0, len(SAMPLE_FIELDS)), np.int32))
            for done, _ in enumerate(self._graphs.capture(parts), 1):
                report(done / len(parts))

    def _all_shapes(self) -> list[Shape]:
        """The largest first."""
        rows = self._decode_sizes[-1]
        shapes = [Shape.mixed(n, rows) for n in self._mixed_sizes]
        shapes += [Shape.decode(n) for n in self._decode_sizes]
        shapes += [Shape.decode(n, True) for n in self._sharing_sizes]
        return sorted(shapes, key=lambda shape: shape.tokens, reverse=True)

    # ------------------------------------------------------------------ a step

    def launch(self, step: StepInput) -> Callable[[], StepOutput]:
        """Start a step; the returned function waits for its tokens."""
        with torch.inference_mode():
            return self._launch(step)

    def _launch(self, step: StepInput) -> Callable[[], StepOutput]:
        assert self._storage is not None
        for row in step.freed:
            self._sampler.drop(row)
        for start in step.starts:
            self._sampler.start(start)
        self._storage.copy_pages(step.copies)
        lengths = [len(entry.token_ids) for entry in step.entries]
        starts = starts_of(lengths)
        shape = self._shape(lengths, step.shared_keys)
        last = [starts[s.entry] + lengths[s.entry] - 1 for s in step.samples]
        samples = self._sampler.words(step.samples, last)
        *earlier, updates = self._staging.parts(step.page_updates)
        for part in earlier:
            self._staging.send([], part, samples[:0])
            self._prepare(Shape.decode(1))
        self._staging.send(step.entries, updates, samples)
        if self._prompt_lens is not None:
            given = np.repeat([entry.prompt_len for entry in step.entries], lengths)
            self._prompt_lens[: len(given)] = upload(given, self._device)
        scores = []
        if step.scores:  # needs the hidden states of more tokens than graphs leave
            hidden = self._forward(shape)
            scores = [self._score(hidden, starts[s.entry] + s.start, s) for s in step.scores]
        else:
            self._graphs.run(shape, partial(self._forward, shape))
        count = len(step.samples)
        if not count:
            finish = _no_samples
        elif self._sampler.is_plain(step.samples):
            size = fitting(self._decode_sizes, count)
            self._readback.guard()
            self._graphs.run(size, partial(self._draw, size))
            finish = self._read_tokens(count)
        else:
            logits = self._decoder.logits(self._sampled[:count])
            tokens, finish = self._sampler.sample(logits, step.samples)
            rows = self._tensors.sample_rows[:count]
            self._state.last_token.index_copy_(0, rows, tokens.clamp(min=0))
        if not scores:
            return finish
        return lambda: replace(finish(), prompt_logprobs=[score() for score in scores])

    def _shape(self, lengths: Sequence[int], shared_keys: int) -> Shape:
        if max(lengths) == 1:
            size = fitting(self._decode_sizes, len(lengths))
            spared = shared_keys * self._shared_bytes
            pays = spared > LEAST_SPARED + size * LEAST_SPARED_A_REQUEST
            return Shape.decode(size, pays and size >= LEAST_SHARING)
        size = fitting(self._mixed_sizes, sum(lengths))
        return Shape.mixed(size, self._decode_sizes[-1])

    def _prepare(self, shape: Shape) -> StepTensors:
        samples = self._tensors.sample_rows.shape[0]
        tensors = self._tensors.cut(shape.tokens, shape.requests, samples)
        prepare_step(self._staging.device_words, self._state, tensors, self._page_size)
        return tensors

    def _forward(self, shape: Shape) -> Tensor:
        """From the packed step to the hidden states, and those that are sampled from."""
        assert self._storage is not None
        step = self._prepare(shape)
        lengths = None
        if self._prompt_lens is not None:
            lengths = torch.maximum(step.positions + 1, self._prompt_lens[: shape.tokens])
        kv: dict[int, LayerKV] = {}
        for number, group in enumerate(self._storage.groups):
            batch = PagedBatch(
                step.cu_seqlens_q,
                step.kv_lens,
                step.page_tables[number],
                max_q_len=shape.max_q_len,
                max_kv_len=self._max_kv_len,
            )
            if shape.shares and group.spec.window is None:
                prefix = prefixes_of(batch, self._page_size, LEAST_COMMON)
                batch = replace(batch, prefix=prefix)
            # One plan for all layers of equal shapes.
            plans: dict[Hashable, tuple[PagedBatch, AttentionPlan]] = {}
            for layer in group.layers:
                call = self._calls[layer]
                if call not in plans:
                    attention = self._decoder.layers[layer].attention
                    plans[call] = attention.plan(call, batch, shape.tokens)
                planned, plan = plans[call]
                kv[layer] = LayerKV(
                    *self._storage.layer(layer), step.slots[number], planned, lengths, plan
                )
        layers = [kv[layer] for layer in range(len(kv))]
        with weights_at_rest():
            hidden = self._decoder.forward(step.token_ids, step.positions, layers)
        torch.index_select(hidden, 0, step.sample_tokens, out=self._sampled)
        return hidden

    def _draw(self, size: int) -> None:
        """From hidden states to tokens, which the rows' next step then finds."""
        step = self._tensors.cut(1, 1, size)
        logits = self._decoder.logits(self._sampled[:size])
        tokens, _ = SAMPLE.handle(
            *(logits, step.temperature, step.top_k, step.top_p, step.min_p),
            *([None] * 10),
            *(step.seeds, step.sample_index, step.positions_drawn, "auto"),
        )
        self._tokens[:size] = tokens
        # -1 marks a row that failed; a step may be under way that still computes for it.
        self._state.last_token.index_copy_(0, step.sample_rows, tokens.clamp(min=0))

    def _read_tokens(self, count: int) -> Callable[[], StepOutput]:
        wait = self._readback.start([self._tokens[:count]])

        def finish() -> StepOutput:
            (tokens,) = wait()
            return StepOutput(tokens.tolist(), [None] * count)

        return finish

    def _score(
        self, hidden: Tensor, first: int, slot: ScoreSlot
    ) -> Callable[[], list[TokenLogprobs]]:
        """Log-probabilities of an entry's prompt tokens, a bounded number of rows at a time."""
        waits = []
        for start in range(0, len(slot.targets), SCORED_ROWS):
            targets = slot.targets[start : start + SCORED_ROWS]
            logits = self._decoder.logits(hidden[first + start : first + start + len(targets)])
            ids = upload(targets, self._device, torch.int64)
            tops = [slot.top] * len(targets)
            wait = self._readback.start(logprob_tensors(logits, ids, tops))
            waits.append((targets, tops, wait))

        def finish() -> list[TokenLogprobs]:
            return [
                e for targets, tops, wait in waits for e in read_logprobs(targets, tops, *wait())
            ]

        return finish


def _no_samples() -> StepOutput:
    return StepOutput([], [])
