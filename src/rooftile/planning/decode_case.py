"""One paged-attention call by its name, such as `b64 loguniform128..32k h32/8 d128 page16`.

The words: `b` requests; the keys of each: a number, `loguniformLOW..HIGH` drawn, or `oneLONG` and
`restSHORT`, one long request among short ones (`4k` is 4096); `q` query tokens of each, 1 where left out, `qall` where
the whole request is computed; `h` query and key-value heads; `d` head dimension, `d576/512` of keys and
of values; `page` tokens of a page; `fp8` pages in 8 bits; `window` keys that a query sees before itself;
`shared` keys that all requests begin with, in the same pages.
"""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass

from rooftile.planning.case_words import words_of
from rooftile.planning.roofline import Work, attention_work

WORDS = "b64 loguniform128..32k h32/8 d128 page16"
_LENGTH = r"\d+k?"
_FORMS = {
    "b": r"b(\d+)",
    "keys": rf"({_LENGTH})|loguniform({_LENGTH})\.\.({_LENGTH})|one({_LENGTH})",
    "rest": rf"rest({_LENGTH})",
    "q": r"q(\d+|all)",
    "h": r"h(\d+)(?:/(\d+))?",
    "d": r"d(\d+)(?:/(\d+))?",
    "page": r"page(\d+)",
    "fp8": r"fp8",
    "window": rf"window({_LENGTH})",
    "shared": rf"shared({_LENGTH})",
}
_DEFAULTS = {"q": "q1", "page": "page16"}


@dataclass(frozen=True)
class DecodeCase:
    """name: as given. window: keys before a query's own that it sees, -1 for all of them."""

    name: str
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    num_q_heads: int
    num_kv_heads: int
    k_dim: int
    v_dim: int
    page_size: int
    fp8: bool
    window: int
    shared: int = 0

    @property
    def group_size(self) -> int:
        return self.num_q_heads // self.num_kv_heads

    @property
    def kv_itemsize(self) -> int:
        return 1 if self.fp8 else 2

    @property
    def kv_bytes(self) -> int:
        """Keys and values that the queries see, each once; a latent's values are part of its keys.

        Shared keys count once for all requests.
        """
        seen = sum(
            kv if self.window < 0 else min(kv, q + self.window)
            for q, kv in zip(self.q_lens, self.kv_lens, strict=True)
        )
        seen -= self.shared * (len(self.kv_lens) - 1)
        dims = self.k_dim if self.latent else self.k_dim + self.v_dim
        return seen * self.num_kv_heads * dims * self.kv_itemsize

    @property
    def latent(self) -> bool:
        """Values are the first dims of keys, as in multi-head latent attention."""
        return self.k_dim > 256

    def work(self) -> Work:
        work = attention_work(
            self.q_lens, self.kv_lens, num_q_heads=self.num_q_heads,
            num_kv_heads=self.num_kv_heads, k_dim=self.k_dim, v_dim=self.v_dim,
        )  # fmt: skip
        q_bytes = 2 * sum(self.q_lens) * self.num_q_heads * (self.k_dim + self.v_dim)
        return Work(work.flops, float(self.kv_bytes + q_bytes), work.exps)


def decode_case(text: str) -> DecodeCase:
    """The case that `text` names, drawn lengths the same on every machine.

    Raises:
        ValueError: a word that is not understood, missing, or given twice; a number too large.
    """
    found = words_of(text, _FORMS, WORDS)
    for key, word in _DEFAULTS.items():
        found.setdefault(key, re.fullmatch(_FORMS[key], word))  # type: ignore[arg-type]
    missing = [name for name in ("b", "keys", "h", "d") if name not in found]
    if missing:
        raise ValueError(f"case {text!r} has no {missing[0]!r} word; write {WORDS!r}")
    batch = int(found["b"][1])
    heads, dims = ((int(m[1]), int(m[2] or m[1])) for m in (found["h"], found["d"]))
    rest = _number(found["rest"][1]) if "rest" in found else None
    kv_lens = _kv_lens(batch, found["keys"], rest, text)
    wanted = found["q"][1]
    q_lens = kv_lens if wanted == "all" else (int(wanted),) * batch
    page_size = int(found["page"][1])
    if min(batch, *heads, *dims, *q_lens, page_size) < 1 or heads[0] % heads[1]:
        raise ValueError(
            f"case {text!r}: requests, queries, heads, dims and pages must be positive, and query "
            f"heads a multiple of key-value heads"
        )
    window = _number(found["window"][1]) if "window" in found else -1
    shared = _number(found["shared"][1]) if "shared" in found else 0
    before = min(kv - q for q, kv in zip(q_lens, kv_lens, strict=True))
    if shared and (shared % page_size or shared > before or window >= 0):
        raise ValueError(
            f"case {text!r}: {shared} shared keys must be whole pages before every query, and there "
            f"must be no window"
        )
    return DecodeCase(
        *(" ".join(text.split()), q_lens, kv_lens, *heads, *dims, page_size, "fp8" in found),
        *(window, shared),
    )


def _kv_lens(batch: int, match: re.Match[str], rest: int | None, text: str) -> tuple[int, ...]:
    same, low, high, long = match.groups()
    if (rest is None) != (long is None):
        raise ValueError(f"case {text!r}: one and rest go together, as in 'one32k rest512'")
    if same:
        return (_number(same),) * batch
    if long and rest is not None:
        return (_number(long), *[rest] * (batch - 1))
    least, most = _number(low), _number(high)
    if not 0 < least <= most:
        raise ValueError(f"case {text!r}: lengths {match[0]} must go up from 1 or more")
    draw = random.Random(0)
    ratio = math.log(most / least)
    return tuple(min(most, int(least * math.exp(draw.random() * ratio))) for _ in range(batch))


def _number(text: str) -> int:
    return int(text[:-1]) * 1024 if text.endswith("k") else int(text)
