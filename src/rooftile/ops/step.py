"""From the deltas of one engine step to the tensors that a forward pass reads, on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from rooftile.ops.operator import Operator

# Words of a packed step (int32): a header, then sections in any order.
HEADER = ("entries", "tokens", "updates", "samples")  # how many of each; then where each begins
HEADER_WORDS = 16
ENTRY = ("row", "first", "q_start", "q_len", "write_from")
UPDATE = ("group", "row", "start", "count", "pages_at")
SAMPLE = (
    *("token", "row", "position", "sample_index", "temperature", "top_k", "top_p", "min_p"),
    *("seed_low", "seed_high"),
)


@dataclass(frozen=True)
class StepCall:
    """The static properties that choose a kernel."""

    device: str


@dataclass(frozen=True)
class StepState:
    """What stays on the device between steps, by stable row. One row more than sequences can have:
    samples that are padding belong to it.
    """

    page_tables: Tensor  # [groups, max_rows, max_pages] int32
    last_token: Tensor  # [max_rows + 1] int64, the token that each row sampled last


@dataclass(frozen=True)
class StepTensors:
    """What a forward pass and its sampling read. Its first `requests` entries are the step's; the
    others are padding: no query tokens, no KV, a greedy sample of token 0 for the spare row.
    """

    token_ids: Tensor  # [tokens] int64
    positions: Tensor  # [tokens] int64
    slots: Tensor  # [groups, tokens] int64, -1 writes nothing
    cu_seqlens_q: Tensor  # [requests + 1] int32
    kv_lens: Tensor  # [requests] int32
    page_tables: Tensor  # [groups, requests, max_pages] int32
    sample_tokens: Tensor  # [samples] int64, index into the step's tokens
    sample_rows: Tensor  # [samples] int64
    positions_drawn: Tensor  # [samples] int64
    sample_index: Tensor  # [samples] int64
    seeds: Tensor  # [samples] int64
    top_k: Tensor  # [samples] int64
    temperature: Tensor  # [samples] float32
    top_p: Tensor  # [samples] float32
    min_p: Tensor  # [samples] float32

    @classmethod
    def empty(
        cls, tokens: int, requests: int, samples: int, tables: Tensor, device: torch.device
    ) -> StepTensors:
        """For so many of each; tables: `StepState.page_tables`."""

        def ints(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        groups, _, pages = tables.shape
        return cls(
            *(ints(tokens), ints(tokens), ints(groups, tokens)),
            ints(requests + 1, dtype=torch.int32),
            ints(requests, dtype=torch.int32),
            ints(groups, requests, pages, dtype=torch.int32),
            *(ints(samples) for _ in range(6)),
            *(ints(samples, dtype=torch.float32) for _ in range(3)),
        )

    def cut(self, tokens: int, requests: int, samples: int) -> StepTensors:
        """Views of the first so many of each."""
        sizes = {"token_ids": tokens, "positions": tokens, "kv_lens": requests}
        views = {}
        for field in fields(self):
            tensor = getattr(self, field.name)
            if field.name == "slots":
                views[field.name] = tensor[:, :tokens]
            elif field.name == "page_tables":
                views[field.name] = tensor[:, :requests]
            elif field.name == "cu_seqlens_q":
                views[field.name] = tensor[: requests + 1]
            else:
                views[field.name] = tensor[: sizes.get(field.name, samples)]
        return StepTensors(**views)

    @property
    def all(self) -> Sequence[Tensor]:
        return [getattr(self, field.name) for field in fields(self)]


def prepare_step(
    packed: Tensor,  # [words] int32, as `engine/staging.py` lays it out
    state: StepState,
    out: StepTensors,
    page_size: int,
    *,
    kernel: str = "auto",
) -> None:
    """Apply the step's changes of page tables to `state`, and fill `out`, padding included.

    Nothing is checked: contents are what the engine's scheduler says. Where more rows of page
    tables are asked for than a request has pages, the rest of its row keeps what it had.
    """
    PREPARE_STEP.handle(packed, state.page_tables, state.last_token, *out.all, page_size, kernel)


_WRITTEN = [f.name for f in fields(StepTensors)]
_MARKS = "bcdefghijklmnopqrstuvwxyz"

PREPARE_STEP = Operator(
    "prepare_step",
    "(Tensor packed, Tensor(a!) row_tables, Tensor last_token, "
    + ", ".join(f"Tensor({m}!) {n}" for m, n in zip(_MARKS, _WRITTEN, strict=False))
    + ", int page_size) -> ()",
    module="step",
    families=("triton", "reference"),
    call=lambda packed, *_: StepCall(packed.device.type),
    fake=lambda *_: None,
)
