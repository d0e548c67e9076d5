"""How long an engine takes from its process's start to its first answer, and its memory at the most.

Run as a module, this is the process of one engine; `start_up` starts it and watches.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

from rooftile.bench.failure import MeasurementFailed
from rooftile.bench.workloads import Request

# Requests after the first answer, so that the memory is that of work.
REQUESTS, PROMPT, NEW = 32, 32, 32
REFUSED = "refused: "  # how a process says why it cannot


@dataclass(frozen=True)
class StartUp:
    """seconds: from the process's start, imports included, to the first token of an answer;
    peak_bytes: most resident memory, after 32 requests of 32 + 32 tokens.
    """

    seconds: float
    peak_bytes: int


def start_up(contender: str, model: str, options: dict[str, Any], threads: int) -> StartUp:
    """Start one contender in a process of its own. options: of Rooftile's engine.

    Raises:
        ValueError: it refused the model or the options, or something is not installed.
        MeasurementFailed: it failed; with the end of what it said.
    """
    task = {"contender": contender, "model": model, "options": options, "threads": threads}
    command = [sys.executable, "-m", "rooftile.bench.start_up", json.dumps(task)]
    began = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
    )
    assert process.stdout is not None
    seconds = None
    for line in process.stdout:
        if line.startswith(REFUSED):
            process.communicate()
            raise ValueError(f"{contender}: {line[len(REFUSED) :].strip()}")
        if line.strip() == "answered":
            seconds = time.perf_counter() - began
            break
    rest, errors = process.communicate()
    if process.returncode or seconds is None:
        raise MeasurementFailed(f"{contender} did not start: {errors.strip()[-1000:]}")
    return StartUp(seconds, json.loads(rest.strip().splitlines()[-1])["peak_bytes"])


def _main(task: dict[str, Any]) -> None:
    import resource

    import torch

    from rooftile.bench.contenders import PEERS, Contender, Engine

    torch.set_num_threads(task["threads"])
    name, model, options = task["contender"], task["model"], task["options"]
    engine: Contender
    if name == Engine.name:
        from rooftile.engine.llm import LLM

        engine = Engine(LLM(model, **options))
    else:
        engine = PEERS[name](model, options.get("random_weights", False))
    engine.run([Request((11, 12, 13), 1)], 0.0)
    print("answered", flush=True)
    prompts = [tuple(100 + 7 * i + j for j in range(PROMPT)) for i in range(REQUESTS)]
    engine.run([Request(prompt, NEW) for prompt in prompts], 0.0)
    # In KiB on Linux, bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    print(json.dumps({"peak_bytes": peak}), flush=True)


if __name__ == "__main__":
    try:
        _main(json.loads(sys.argv[1]))
    except (ValueError, OSError, ImportError, NotImplementedError, MemoryError) as error:
        print(REFUSED + " ".join(str(error).split()), flush=True)
        sys.exit(1)
