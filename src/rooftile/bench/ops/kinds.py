"""What the suites of dual chunk and of differential attention share.

Cases are named as `rooftile.planning.decode_case` says, and one word more: `dense` for keys without pages.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rooftile.bench.ops.paged import CHECKED, CHECKED_ROWS, Inputs
from rooftile.bench.ops.suite import WrongResult
from rooftile.planning.decode_case import DecodeCase, decode_case

Exact = Callable[[int, int, Tensor], Tensor]  # request, head, positions of queries -> [rows, v_dim]


def case_of(text: str, word: str = "") -> tuple[DecodeCase, bool, int]:
    """The case, whether it is dense, and the number of the suite's own word, 0 where it has none.

    Raises:
        ValueError: as `decode_case`; a case that pages in 8 bits, windows or latents are part of.
    """
    own = re.compile(rf"{word}(\d+)") if word else None
    words = text.split()
    numbers = [int(m[1]) for w in words if own and (m := own.fullmatch(w))]
    rest = [w for w in words if w != "dense" and not (own and own.fullmatch(w))]
    case = replace(decode_case(" ".join(rest)), name=" ".join(words))
    if case.fp8 or case.window >= 0 or case.latent or case.shared or len(numbers) > 1:
        raise ValueError(
            f"case {text!r}: pages in 8 bits, windows, shared keys and keys of more than 256 are not "
            f"measured here, nor any word twice; leave them out"
        )
    dense = "dense" in words
    if dense and (len(set(case.kv_lens)) > 1 or case.q_lens != case.kv_lens):
        raise ValueError(
            f"case {text!r}: dense requests have equal lengths and all queries; add qall"
        )
    return case, dense, numbers[0] if numbers else 0


def gathered(made: Inputs) -> tuple[Tensor, Tensor]:
    """Keys and values [batch, kv_len, heads, dim] of requests of equal lengths, out of their pages."""
    pages, kv_len = made.batch.page_table.long(), made.batch.max_kv_len
    k, v = (
        x[pages].transpose(2, 3).flatten(1, 2)[:, :kv_len].contiguous()
        for x in (made.k_pages, made.v_pages)
    )
    return k, v


def keys_of(made: Inputs, case: DecodeCase, request: int, kv_head: int) -> tuple[Tensor, Tensor]:
    """Of a request's head [kv_len, dim], float64."""
    kv_len = case.kv_lens[request]
    pages = made.batch.page_table[request, : -(-kv_len // case.page_size)].long()
    keys, values = (
        x[pages, kv_head].flatten(0, 1)[:kv_len].double() for x in (made.k_pages, made.v_pages)
    )
    return keys, values


def checker(
    case: DecodeCase, heads: int, device: torch.device, exact: Exact
) -> Callable[[Any], float]:
    """Error on drawn rows of what lies [tokens, heads, dim]: norm of the difference over the oracle's."""
    generator = torch.Generator().manual_seed(1)

    def draw(below: int) -> int:
        return int(torch.randint(below, (1,), generator=generator))

    count = len(case.kv_lens)
    longest = max(range(count), key=lambda i: case.kv_lens[i])
    pairs = [(longest, heads - 1), (count - 1, 0)]
    pairs += [(draw(count), draw(heads)) for _ in range(CHECKED - len(pairs))]
    expected: list[tuple[Tensor, int, Tensor]] = []
    for request, head in pairs:
        q_len = case.q_lens[request]
        rows = torch.randint(q_len, (CHECKED_ROWS,), generator=generator)
        rows[:2] = torch.tensor([0, q_len - 1])
        at = (rows + case.kv_lens[request] - q_len).to(device)
        tokens = (rows + sum(case.q_lens[:request])).to(device)
        expected.append((tokens, head, exact(request, head, at)))

    def check(out: Tensor) -> float:
        out = out.reshape(-1, *out.shape[-2:])
        difference = norm = 0.0
        for tokens, head, wanted in expected:
            off = (out[tokens, head].double() - wanted).abs()
            unit = torch.finfo(out.dtype).eps * (4 if out.dtype.itemsize == 2 else 32)
            allowed = unit * (wanted.abs().amax(-1, keepdim=True) + 0.1)
            if not bool((off <= allowed).all()):
                raise WrongResult(
                    f"{case.name}: head {head} is off by "
                    f"{float(off.nan_to_num(nan=torch.inf).max()):.2g}, allowed {allowed.max():.2g}"
                )
            difference += float(off.square().sum())
            norm += float(wanted.square().sum())
        return float((difference / max(norm, 1e-300)) ** 0.5)

    return check


def softmax_of(
    queries: Sequence[Tensor],  # of each run of keys, [rows, dim]
    classes: Tensor,  # [rows, kv_len], which of them a key meets
    keys: Tensor,  # [kv_len, dim]
    at: Tensor,  # [rows], positions
) -> Tensor:  # [rows, kv_len] causal weights
    scores = classes * torch.zeros((), dtype=torch.float64, device=keys.device)
    for number, q in enumerate(queries):
        scores = torch.where(classes == number, q.double() @ keys.T * keys.shape[1] ** -0.5, scores)
    hidden = torch.arange(keys.shape[0], device=keys.device) > at[:, None]
    return torch.softmax(scores.masked_fill(hidden, -torch.inf), -1).nan_to_num(0)
