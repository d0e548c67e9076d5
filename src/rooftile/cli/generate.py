"""`rooftile generate`: answers to prompts, as text or as JSON lines."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rooftile.cli import loading
from rooftile.cli.conversation import Message, has_template, stream_text
from rooftile.cli.errors import print_error
from rooftile.cli.options import EngineOptions, SamplingOptions, with_options
from rooftile.cli.prompts import collect_prompts

if TYPE_CHECKING:
    from rooftile.engine.outputs import CompletionOutput, RequestOutput


@with_options(sampling=SamplingOptions, engine=EngineOptions)
def generate(
    engine: EngineOptions,
    sampling: SamplingOptions,
    prompts: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PROMPT]...", show_default=False, help="One or more prompts."),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(
            "--input",
            "-i",
            metavar="FILE",
            help='A prompt per line, or JSON lines with {"prompt": ...}; "-" reads them from '
            "standard input.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object per prompt and line.")
    ] = False,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            show_default=False,
            help="Put each prompt into the model's chat template, or continue it as it is "
            "(default: --chat where the model has a template).",
        ),
    ] = None,
    system: Annotated[
        str | None, typer.Option(help="System message before each prompt (with --chat).")
    ] = None,
) -> None:
    """Answer prompts from the arguments, a file, or standard input.

    Without PROMPT and --input, all of standard input is one prompt.
    """
    if chat is False and system is not None:
        raise typer.BadParameter("has no place in a --raw prompt", param_hint="--system")
    texts = collect_prompts(prompts, source)
    params = sampling.sampling_params()
    llm = loading.load_llm(engine, sampling.seed)
    in_chat = has_template(llm) if chat is None else chat
    if system is not None and not in_chat:
        raise ValueError(
            f"--system needs a chat template and {engine.model} has none; put it into the prompt"
        )
    requests: list[Any] = (
        [llm.render_chat(_messages(text, system)) for text in texts] if in_chat else list(texts)
    )

    if len(texts) == 1 and params.n == 1 and not as_json:
        output = stream_text(llm.stream(requests[0], params), sys.stdout)
        failed = report_failures([output])
    else:
        outputs = llm.generate(requests, params, progress=sys.stderr.isatty())
        for position, (text, output) in enumerate(zip(texts, outputs, strict=True)):
            if as_json:
                print(json.dumps(_record(position, text, output), ensure_ascii=False))
            else:
                _print_text(position, len(texts), text, output)
        failed = report_failures(outputs)
    sys.stdout.flush()
    if failed:
        raise typer.Exit(1)


def report_failures(outputs: list[RequestOutput]) -> bool:
    """Print the errors of failed answers; whether there are any."""
    errors = [answer.error for output in outputs for answer in output.outputs if answer.error]
    for error in errors:
        print_error(error)
    return bool(errors)


def _messages(text: str, system: str | None) -> list[Message]:
    before = [] if system is None else [Message(role="system", content=system)]
    return [*before, Message(role="user", content=text)]


def _print_text(position: int, count: int, prompt: str, output: RequestOutput) -> None:
    if count > 1:
        line = " ".join(prompt.split())
        shown = line if len(line) <= 60 else f"{line[:59]}…"
        print(f"{'' if position == 0 else chr(10)}=== {position + 1}/{count}: {shown}")
    for answer in output.outputs:
        if len(output.outputs) > 1:
            print(f"--- answer {answer.index + 1} of {len(output.outputs)}")
        print(answer.text)


def _record(position: int, prompt: str, output: RequestOutput) -> dict[str, Any]:
    return {
        "index": position,
        "prompt": prompt,
        "prompt_tokens": len(output.prompt_token_ids),
        "cached_tokens": output.num_cached_tokens,
        "time_to_first_token": output.metrics.time_to_first_token,
        "latency": output.metrics.latency,
        "outputs": [_answer_record(answer) for answer in output.outputs],
    }


def _answer_record(answer: CompletionOutput) -> dict[str, Any]:
    record = {
        "index": answer.index,
        "text": answer.text,
        "token_ids": answer.token_ids,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
        "error": answer.error,
    }
    if answer.logprobs is not None:
        record["cumulative_logprob"] = answer.cumulative_logprob
        record["logprobs"] = [asdict(token) for token in answer.logprobs]
    return record
