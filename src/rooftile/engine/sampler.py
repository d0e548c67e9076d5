"""Sampling state by stable row, and the call of `ops.sample` for the rows of a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rooftile.engine.outputs import TokenLogprobs
from rooftile.engine.step import RowStart, SampleSlot, StepOutput
from rooftile.ops.sampling import SamplingTensors, sample, top_logprobs

# Numbers of SamplingParams that each row keeps on the device, and the value that turns them off.
ROW_NUMBERS = {
    "temperature": (torch.float32, 0),
    "top_k": (torch.int64, 0),
    "top_p": (torch.float32, 1),
    "min_p": (torch.float32, 0),
    "repetition_penalty": (torch.float32, 1),
    "presence_penalty": (torch.float32, 0),
    "frequency_penalty": (torch.float32, 0),
}


class Sampler:
    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._starts: list[RowStart | None] = [None] * max_rows
        self._numbers = {
            name: torch.full((max_rows,), off, dtype=dtype, device=device)
            for name, (dtype, off) in ROW_NUMBERS.items()
        }
        self._seeds = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._sample_index = torch.zeros(max_rows, dtype=torch.int64, device=device)
        # Token counts take a vocabulary a row, so only rows whose penalties need them have them.
        self._prompt_mask: dict[int, Tensor] = {}
        self._output_counts: dict[int, Tensor] = {}
        # The tokens so far, on the host, for rows with a logits processor.
        self._output_ids: dict[int, list[int]] = {}

    def drop(self, row: int) -> None:
        """Forget what grows with the vocabulary or the text of a row's sequence."""
        self._starts[row] = None
        self._prompt_mask.pop(row, None)
        self._output_counts.pop(row, None)
        self._output_ids.pop(row, None)

    def start(self, start: RowStart) -> None:
        row = start.row
        self.drop(row)
        self._starts[row] = start
        for name, table in self._numbers.items():
            table[row] = getattr(start.params, name)
        self._seeds[row] = start.seed
        self._sample_index[row] = start.sample_index
        if start.params.logits_processor is not None:
            self._output_ids[row] = list(start.output_ids)
        if start.params.counts_tokens:
            prompt = torch.tensor(start.prompt_ids, dtype=torch.int64, device=self._device)
            output = torch.tensor(start.output_ids, dtype=torch.int64, device=self._device)
            mask = torch.zeros(self._vocab_size, dtype=torch.bool, device=self._device)
            self._prompt_mask[row] = mask.index_fill_(0, prompt, True)
            self._output_counts[row] = torch.bincount(output, minlength=self._vocab_size).int()

    def sample(
        self,
        logits: Tensor,  # [slots, vocab] float32
        slots: Sequence[SampleSlot],
    ) -> tuple[Tensor, StepOutput]:
        """The new tokens on the device [slots], for the rows' next step, and on the host."""
        starts = [self._start_of(slot) for slot in slots]
        processed, errors = self._process(logits, slots, starts)
        tokens, _ = sample(processed, self._tensors(slots, starts))
        for at in errors:
            tokens[at] = -1
        for token, slot in zip(tokens, slots, strict=True):
            if slot.row in self._output_counts:
                # -1 marks a failed row, which takes no further step.
                self._output_counts[slot.row][token.clamp(min=0)] += 1
            if slot.row in self._output_ids:
                self._output_ids[slot.row].append(int(token))
        token_ids = tokens.tolist()
        wanted = {
            at: start.params.logprobs
            for at, start in enumerate(starts)
            if start.params.logprobs is not None and token_ids[at] >= 0
        }
        logprobs: list[TokenLogprobs | None] = [None] * len(token_ids)
        if wanted:
            rows = list(wanted)
            found = token_logprobs(logits[rows], tokens[rows], list(wanted.values()))
            for at, entry in zip(rows, found, strict=True):
                logprobs[at] = entry
        return tokens, StepOutput(token_ids, logprobs, errors)

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
        rows = torch.tensor([slot.row for slot in slots], device=self._device)
        used = {
            name: self._numbers[name][rows]
            for name, (_, off) in ROW_NUMBERS.items()
            if any(getattr(start.params, name) != off for start in starts)
        }
        if "temperature" in used:
            used["seeds"] = self._seeds[rows]
            used["sample_index"] = self._sample_index[rows]
            used["position"] = torch.tensor([s.position for s in slots], device=self._device)
        if self._output_counts and any(start.params.counts_tokens for start in starts):
            used["prompt_mask"] = self._stack(self._prompt_mask, slots, torch.bool)
            used["output_counts"] = self._stack(self._output_counts, slots, torch.int32)
        bias = [
            (at, token, value)
            for at, start in enumerate(starts)
            for token, value in (start.params.logit_bias or {}).items()
        ]
        if bias:
            at, ids, values = zip(*bias, strict=True)
            used["bias_rows"] = torch.tensor(at, device=self._device)
            used["bias_ids"] = torch.tensor(ids, device=self._device)
            used["bias_values"] = torch.tensor(values, dtype=torch.float32, device=self._device)
        banned = [
            (at, token)
            for at, (slot, start) in enumerate(zip(slots, starts, strict=True))
            if slot.position < start.params.min_tokens
            for token in start.stop_token_ids
        ]
        if banned:
            at, ids = zip(*banned, strict=True)
            used["banned_rows"] = torch.tensor(at, device=self._device)
            used["banned_ids"] = torch.tensor(ids, device=self._device)
        return SamplingTensors(**used)

    def _stack(
        self, tables: dict[int, Tensor], slots: Sequence[SampleSlot], dtype: torch.dtype
    ) -> Tensor:
        nothing = torch.zeros(self._vocab_size, dtype=dtype, device=self._device)
        return torch.stack([tables.get(slot.row, nothing) for slot in slots])


def token_logprobs(
    logits: Tensor,  # [rows, vocab] float32
    token_ids: Tensor,  # [rows]
    tops: Sequence[int],  # of each row, how many of the likeliest tokens to report
) -> list[TokenLogprobs]:
    chosen = logits.gather(1, token_ids[:, None]).squeeze(1) - logits.logsumexp(-1)
    top, ids = (t.tolist() for t in top_logprobs(logits, max(tops, default=0)))
    return [
        TokenLogprobs(token, logprob, tuple(zip(row_ids[:count], row_top[:count], strict=True)))
        for token, logprob, row_ids, row_top, count in zip(
            token_ids.tolist(), chosen.tolist(), ids, top, tops, strict=True
        )
    ]
