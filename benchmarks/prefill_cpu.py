"""Tokens per second of prompts of 8,000 tokens against 512, in turn: python benchmarks/prefill_cpu.py"""

from __future__ import annotations

import random
import time
from statistics import median

from rooftile import LLM, SamplingParams

SHORT, LONG, ROUNDS = 512, 8000, 5


def main() -> None:
    params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    for quantization in ("int4", "int8", "none"):
        llm, draw = LLM("demo", quantization=quantization), random.Random(0)
        rates: dict[int, list[float]] = {SHORT: [], LONG: []}
        for _ in range(ROUNDS):
            for length in rates:
                prompt = [draw.randrange(10, 40000) for _ in range(length)]
                began = time.perf_counter()
                llm.generate([prompt], params)
                rates[length].append(length / (time.perf_counter() - began))
        short, long = median(rates[SHORT][1:]), median(rates[LONG][1:])
        print(
            f"{quantization}: {SHORT} tokens {short:.0f}, {LONG} tokens {long:.0f}: {long / short:.2f}"
        )


if __name__ == "__main__":
    main()
