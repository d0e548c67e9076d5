"""Sampling state by stable row, and the call of `ops.sample` for the rows of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from rooftile.engine.outputs import TokenLogprobs
from rooftile.engine.params import SamplingParams
from rooftile.engine.step import RowStart, SampleSlot, StepOutput
from rooftile.engine.transfer import Readback, upload
from rooftile.ops.sampling import SamplingTensors, run_sample, sample, top_logprobs
from rooftile.ops.step import SAMPLE

# Numbers of SamplingParams that each row keeps, and the value that turns them off.
ROW_NUMBERS = {
    "temperature": (np.float32, 0),
    "top_k": (np.int64, 0),
    "top_p": (np.float32, 1),
    "min_p": (np.float32, 0),
    "repetition_penalty": (np.float32, 1),
    "presence_penalty": (np.float32, 0),
    "frequency_penalty": (np.float32, 0),
}
INT32_MAX = 2**31 - 1


class Sampler:
    """Numbers stay on the host and go to the device with the step that needs them; what takes a
    vocabulary a row stays on the device.
    """

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._readback = Readback(device)
        self._starts: list[RowStart | None] = [None] * max_rows
        self._numbers = {
            name: np.full(max_rows, off, dtype) for name, (dtype, off) in ROW_NUMBERS.items()
        }
        self._seeds = np.zeros(max_rows, np.int64)
        self._sample_index = np.zeros(max_rows, np.int64)
        # Token counts take a vocabulary a row, so only rows whose penalties need them have them.
        self._prompt_mask: dict[int, Tensor] = {}
        self._output_counts: dict[int, Tensor] = {}
        # Of rows that have some: the tokens with a bias and their biases, and those that end them.
        self._biases: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._stops: dict[int, np.ndarray] = {}
        # The tokens so far, on the host, for rows with a logits processor.
        self._output_ids: dict[int, list[int]] = {}

    def drop(self, row: int) -> None:
        """Forget what grows with the vocabulary or the text of a row's sequence."""
        self._starts[row] = None
        for table in (
            *(self._prompt_mask, self._output_counts, self._output_ids),
            *(self._biases, self._stops),
        ):
            table.pop(row, None)

    def start(self, start: RowStart) -> None:
        row = start.row
        self.drop(row)
        self._starts[row] = start
        for name, table in self._numbers.items():
            table[row] = getattr(start.params, name)
        self._seeds[row] = start.seed
        self._sample_index[row] = start.sample_index
        if bias := start.params.logit_bias:
            ids, values = list(bias), list(bias.values())
            self._biases[row] = np.array(ids, np.int64), np.array(values, np.float32)
        if start.params.min_tokens and start.stop_token_ids:
            self._stops[row] = np.array(sorted(start.stop_token_ids), np.int64)
        if start.params.logits_processor is not None:
            self._output_ids[row] = list(start.output_ids)
        if start.params.counts_tokens:
            prompt = upload(list(start.prompt_ids), self._device, torch.int64)
            output = upload(list(start.output_ids), self._device, torch.int64)
            mask = torch.zeros(self._vocab_size, dtype=torch.bool, device=self._device)
            self._prompt_mask[row] = mask.index_fill_(0, prompt, True)
            counts = torch.zeros(self._vocab_size, dtype=torch.int32, device=self._device)
            ones = torch.ones_like(output, dtype=torch.int32)
            self._output_counts[row] = counts.index_add_(0, output, ones)

    def is_plain(self, slots: Sequence[SampleSlot]) -> bool:
        """Whether tokens follow from the numbers of `words` alone, and nothing but they is asked."""
        return all(_is_plain(self._start_of(slot), slot.position) for slot in slots)

    def words(self, slots: Sequence[SampleSlot], tokens: Sequence[int]) -> np.ndarray:
        """The step's samples as `ops.prepare_step` takes them: [slots, len(SAMPLE)] int32.

        tokens: whose hidden state each slot samples from.
        """
        words = np.empty((len(slots), len(SAMPLE)), np.int32)
        if not slots:
            return words
        rows = np.array([slot.row for slot in slots])
        words[:, 0] = tokens
        words[:, 1] = rows
        words[:, 2] = [slot.position for slot in slots]
        words[:, 3] = self._sample_index[rows]
        words[:, 5] = np.minimum(self._numbers["top_k"][rows], INT32_MAX)
        for column, name in ((4, "temperature"), (6, "top_p"), (7, "min_p")):
            words[:, column] = self._numbers[name][rows].view(np.int32)
        words[:, 8:] = self._seeds[rows].view(np.int32).reshape(-1, 2)
        return words

    def sample(
        self,
        logits: Tensor,  # [slots, vocab] float32
        slots: Sequence[SampleSlot],
    ) -> tuple[Tensor, Callable[[], StepOutput]]:
        """The new tokens on the device [slots], for the rows' next step, and what waits for them on
        the host.
        """
        starts = [self._start_of(slot) for slot in slots]
        processed, errors = self._process(logits, slots, starts)
        # Plain rows have numbers alone, which `SamplingParams` has checked.
        run = run_sample if self.is_plain(slots) else sample
        tokens, _ = run(processed, self._tensors(slots, starts))
        for at in errors:
            tokens[at] = -1
        for at, slot in enumerate(slots):
            if slot.row in self._output_counts:
                # -1 marks a failed row, which takes no further step.
                token = tokens[at : at + 1].clamp(min=0)
                one = torch.ones_like(token, dtype=torch.int32)
                self._output_counts[slot.row].index_add_(0, token, one)
            if slot.row in self._output_ids:
                self._output_ids[slot.row].append(int(tokens[at]))
        asked = [at for at, start in enumerate(starts) if start.params.logprobs is not None]
        results = [tokens]
        tops = [starts[at].params.logprobs or 0 for at in asked]
        if asked:
            rows = upload(asked, self._device, torch.int64)
            results += logprob_tensors(logits[rows], tokens[rows].clamp(min=0), tops)
        wait = self._readback.start(results)

        def finish() -> StepOutput:
            values, *found = wait()
            token_ids = values.tolist()
            logprobs: list[TokenLogprobs | None] = [None] * len(token_ids)
            if asked:
                chosen = [token_ids[at] for at in asked]
                for at, entry in zip(asked, read_logprobs(chosen, tops, *found), strict=True):
                    logprobs[at] = entry if token_ids[at] >= 0 else None
            return StepOutput(token_ids, logprobs, errors)

        return tokens, finish

    def _process(
        self, logits: Tensor, slots: Sequence[SampleSlot], starts: Sequence[RowStart]
    ) -> tuple[Tensor, dict[int, str]]:
        """Logits after the requests' own processors, and by slot what went wrong in them."""
        errors: dict[int, str] = {}
        processed = logits
        for at, (slot, start) in enumerate(zip(slots, starts, strict=True)):
            process = start.params.logits_processor
            if process is None:
                continue
            if processed is logits:
                processed = logits.clone()
            try:
                changed = process(tuple(self._output_ids[slot.row]), logits[at].clone())
                shape = getattr(changed, "shape", None)
                if shape != logits[at].shape:  # torch would broadcast it
                    raise ValueError(
                        f"it returned {type(changed).__name__}"
                        f"{'' if shape is None else f' of shape {list(shape)}'}; "
                        f"return a tensor [vocab] = {list(logits[at].shape)}"
                    )
                processed[at] = changed
            except Exception as error:  # it is the user's code: whatever it raises is their error
                errors[at] = f"logits_processor failed: {type(error).__name__}: {error}"
        return processed, errors

    def _start_of(self, slot: SampleSlot) -> RowStart:
        start = self._starts[slot.row]
        assert start is not None
        return start

    def _tensors(self, slots: Sequence[SampleSlot], starts: Sequence[RowStart]) -> SamplingTensors:
        rows = np.array([slot.row for slot in slots])
        used = {
            name: upload(self._numbers[name][rows], self._device)
            for name, (_, off) in ROW_NUMBERS.items()
            if any(getattr(start.params, name) != off for start in starts)
        }
        if "temperature" in used:
            used["seeds"] = upload(self._seeds[rows], self._device)
            used["sample_index"] = upload(self._sample_index[rows], self._device)
            used["position"] = upload([s.position for s in slots], self._device, torch.int64)
        if self._output_counts and any(start.params.counts_tokens for start in starts):
            used["prompt_mask"] = self._stack(self._prompt_mask, slots, torch.bool)
            used["output_counts"] = self._stack(self._output_counts, slots, torch.int32)
        biased = [at for at, slot in enumerate(slots) if slot.row in self._biases]
        if biased:
            ids, values = zip(*(self._biases[slots[at].row] for at in biased), strict=True)
            used["bias_rows"], used["bias_ids"] = self._pairs(biased, ids)
            used["bias_values"] = upload(np.concatenate(values), self._device)
        banned = [
            at
            for at, (slot, start) in enumerate(zip(slots, starts, strict=True))
            if slot.row in self._stops and slot.position < start.params.min_tokens
        ]
        if banned:
            stops = [self._stops[slots[at].row] for at in banned]
            used["banned_rows"], used["banned_ids"] = self._pairs(banned, stops)
        return SamplingTensors(**used)

    def _pairs(self, rows: Sequence[int], ids: Sequence[np.ndarray]) -> tuple[Tensor, Tensor]:
        """Each row as often as it has ids, and all of these."""
        repeated = np.repeat(np.array(rows, np.int64), [len(of_row) for of_row in ids])
        return upload(repeated, self._device), upload(np.concatenate(ids), self._device)

    def _stack(
        self, tables: dict[int, Tensor], slots: Sequence[SampleSlot], dtype: torch.dtype
    ) -> Tensor:
        nothing = torch.zeros(self._vocab_size, dtype=dtype, device=self._device)
        return torch.stack([tables.get(slot.row, nothing) for slot in slots])


def _is_plain(start: RowStart, position: int) -> bool:
    params: SamplingParams = start.params
    return not (
        params.logprobs is not None
        or params.logits_processor is not None
        or params.counts_tokens
        or params.logit_bias
        or (position < params.min_tokens and start.stop_token_ids)
    )


def logprob_tensors(
    logits: Tensor,  # [rows, vocab] float32
    token_ids: Tensor,  # [rows]
    tops: Sequence[int],  # of each row, how many of the likeliest tokens to report
) -> list[Tensor]:
    """Log-probabilities of the tokens [rows], and of the likeliest [rows, most], with their ids."""
    chosen = logits.gather(1, token_ids[:, None]).squeeze(1) - logits.logsumexp(-1)
    return [chosen, *top_logprobs(logits, max(tops, default=0))]


def read_logprobs(
    token_ids: Sequence[int], tops: Sequence[int], chosen: Tensor, top: Tensor, ids: Tensor
) -> list[TokenLogprobs]:
    """The same tensors, on the host by now, row by row."""
    return [
        TokenLogprobs(token, logprob, tuple(zip(row_ids[:count], row_top[:count], strict=True)))
        for token, logprob, row_ids, row_top, count in zip(
            token_ids, chosen.tolist(), ids.tolist(), top.tolist(), tops, strict=True
        )
    ]
