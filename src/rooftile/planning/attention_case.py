"""One attention call by its name, such as `b1 s16384 h16/16 d128 causal`.

The words: `b` sequences; `s` their length, `s512/4096` queries and keys, or `s16..8192` lengths drawn
between two bounds; `h` query heads, `h32/8` query and key-value heads; `d` head dimension, `d192/128`
of keys and of values; `causal` or `full`; `varlen` lays equal lengths end to end as drawn ones are.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from rooftile.planning.case_words import words_of
from rooftile.planning.roofline import Work, attention_work

_WORDS = "b4 s4096 h32/8 d128 causal"
_FORMS = {
    "b": r"b(\d+)",
    "s": r"s(\d+)(?:(/|\.\.)(\d+))?",
    "h": r"h(\d+)(?:/(\d+))?",
    "d": r"d(\d+)(?:/(\d+))?",
    "mask": r"causal|full",
    "layout": r"varlen",
}


@dataclass(frozen=True)
class AttentionCase:
    """Lengths, heads and dims of a call; `name` in the normal form that results are filed under."""

    name: str
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    num_q_heads: int
    num_kv_heads: int
    k_dim: int
    v_dim: int
    causal: bool
    ragged: bool  # sequences lie end to end

    @property
    def batch(self) -> int:
        return len(self.q_lens)

    def work(self, itemsize: int = 2) -> Work:
        return attention_work(
            self.q_lens,
            self.kv_lens,
            num_q_heads=self.num_q_heads,
            num_kv_heads=self.num_kv_heads,
            k_dim=self.k_dim,
            v_dim=self.v_dim,
            causal=self.causal,
            itemsize=itemsize,
        )


def attention_case(text: str) -> AttentionCase:
    """The case that `text` names; words in any order, `full` and equal heads where left out.

    Lengths `sLOW..HIGH` are log-uniform, the same ones on every machine.

    Raises:
        ValueError: a word that is not understood, missing, or given twice; a number too large.
    """
    found = words_of(text, _FORMS, _WORDS)
    missing = [name for name in ("b", "s", "h", "d") if name not in found]
    if missing:
        raise ValueError(f"case {text!r} has no {missing[0]!r} word; write {_WORDS!r}")
    batch = int(found["b"][1])
    if batch < 1:
        raise ValueError(f"case {text!r} has no sequence; give b1 or more")
    first, kind, second = found["s"].groups()
    heads, dims = ((int(m[1]), int(m[2] or m[1])) for m in (found["h"], found["d"]))
    low, high = int(first), int(second or first)
    if kind == "..":
        if not 0 < low <= high:
            raise ValueError(f"case {text!r}: lengths s{low}..{high} must go up from 1 or more")
        draw = random.Random(0)
        q_lens = tuple(
            min(high, int(low * math.exp(draw.random() * math.log(high / low))))
            for _ in range(batch)
        )
        kv_lens = q_lens
    else:
        q_lens, kv_lens = (low,) * batch, (high,) * batch
    if high < 1 or low < 1:
        raise ValueError(f"case {text!r} has no queries or no keys; give lengths of 1 or more")
    if min(*heads, *dims) < 1 or heads[0] % heads[1]:
        raise ValueError(
            f"case {text!r}: heads and dims must be positive, and query heads a multiple of "
            f"key-value heads"
        )
    causal = "mask" in found and found["mask"][0] == "causal"
    ragged = kind == ".." or "layout" in found
    length = f"s{low}" + (f"{kind}{high}" if kind and (kind == ".." or low != high) else "")
    dim = f"d{dims[0]}" + (f"/{dims[1]}" if dims[0] != dims[1] else "")
    name = f"b{batch} {length} h{heads[0]}/{heads[1]} {dim} {'causal' if causal else 'full'}"
    name += " varlen" if "layout" in found and kind != ".." else ""
    return AttentionCase(name, q_lens, kv_lens, *heads, *dims, causal, ragged)
