"""How a model does beyond the length it was trained for: next-token loss by position in real text,
with plain and with dual chunk attention.

python benchmarks/long_text_loss.py run          # minutes on 2 cores; adds to benchmarks/results
python benchmarks/long_text_loss.py plot FILE    # docs/images/dual_chunk_loss.png, and the table
"""

from __future__ import annotations

import argparse
import json
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

SUITE = "long_text_loss"
PICTURE = Path("docs/images/dual_chunk_loss.png")
BUCKET = 512  # tokens that one number of the file is the mean of
ROW = 1024  # tokens before a length that the table takes the mean of


def losses(model: str, dual_chunk: str, texts: list[list[int]]) -> list[float]:
    """Mean negative log-likelihood in nats of each bucket of positions, over the texts."""
    from rooftile import LLM, SamplingParams

    length = len(texts[0])
    llm = LLM(
        model,
        dual_chunk=dual_chunk,
        max_model_len=length,
        max_num_seqs=1,
        prefix_cache=False,
        num_pages=-(-length // 64) + 1,
        page_size=64,
    )
    sums = [0.0] * (length // BUCKET)
    for text in texts:
        (output,) = llm.generate([text], SamplingParams(max_tokens=0, prompt_logprobs=0))
        for position, entry in enumerate(output.prompt_logprobs or []):
            if entry is not None:
                sums[position // BUCKET] -= entry.logprob / (BUCKET - (position < BUCKET))
    return [total / len(texts) for total in sums]


def run(options: argparse.Namespace) -> None:
    from rooftile import LLM
    from rooftile.bench.host import commit, host, versions
    from rooftile.bench.quality import reference_text

    tokenizer = LLM(options.model, num_pages=64).tokenizer
    ids = tokenizer.encode(reference_text(), add_special_tokens=False)
    apart = (len(ids) - options.length) // max(1, options.texts - 1)
    texts = [ids[i * apart : i * apart + options.length] for i in range(options.texts)]
    # One chunk that is longer than the text is plain attention, without a limit of length.
    kinds = {
        "plain": f"chunk_size={options.length + 1},local_size=1",
        "dual chunk": options.dual_chunk,
    }
    machine = host()
    path = Path("benchmarks/results") / machine.slug / f"{SUITE}.jsonl"
    for kind, dual_chunk in kinds.items():
        row: dict[str, Any] = {
            "suite": SUITE,
            "case": f"{options.model} {options.length} tokens of Python's documentation",
            "attention": kind,
            "dual_chunk": dual_chunk,
            "texts": len(texts),
            "bucket": BUCKET,
            "loss": [round(x, 4) for x in losses(options.model, dual_chunk, texts)],
            "cpu": f"{machine.processor}, {machine.cores} cores",
            "versions": versions(),
            "commit": commit(),
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(kind, row["loss"], flush=True)


def plot(path: Path) -> None:
    from matplotlib import pyplot

    rows = {row["attention"]: row for row in map(json.loads, path.read_text().splitlines())}
    figure, axes = pyplot.subplots(figsize=(7, 3.2), layout="constrained")
    for kind, row in rows.items():
        middles = [(i + 0.5) * row["bucket"] for i in range(len(row["loss"]))]
        axes.plot(middles, row["loss"], label=kind)
    axes.axvline(8192, color="grey", linestyle=":", label="trained length")
    axes.set(xlabel="position in the text", ylabel="loss, nats a token", ylim=(0, None))
    axes.legend(frameon=False)
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, dpi=110)
    print("| loss of the last 1,024 tokens before |", " | ".join(rows), "|")
    print("|---|" + "---|" * len(rows))
    for length in (4096, 8192, 12288, 16384, 20480, 24576):
        means = []
        for row in rows.values():
            end, buckets = length // row["bucket"], ROW // row["bucket"]
            means.append(sum(row["loss"][end - buckets : end]) / buckets)
        print(f"| {length:,} |", " | ".join(f"{x:.2f}" for x in means), "|")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run")
    runs.add_argument("--model", default="demo")
    runs.add_argument("--length", type=int, default=24576, help="tokens of each text")
    runs.add_argument("--texts", type=int, default=2)
    runs.add_argument("--dual-chunk", default="chunk_size=6144,local_size=1024,original=8192")
    commands.add_parser("plot").add_argument("file", type=Path)
    options = parser.parse_args()
    if options.command == "run":
        run(options)
    else:
        plot(options.file)


if __name__ == "__main__":
    main()
