"""`rooftile generate`: answers to prompts, as text or as JSON lines."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rooftile.cli import loading
from rooftile.cli.conversation import has_template, prompts_of, stream_text
from rooftile.cli.errors import print_error
from rooftile.cli.options import (
    BeamOptions,
    EngineOptions,
    SamplingOptions,
    with_options,
    with_recommended,
)
from rooftile.cli.prompts import Asked, collect_prompts
from rooftile.cli.records import output_record
from rooftile.cli.streams import takes_unicode

if TYPE_CHECKING:
    from rooftile.engine.outputs import RequestOutput
    from rooftile.engine.params import Params

LONG_RUN = "Long runs"


@with_options(sampling=SamplingOptions, beams=BeamOptions, engine=EngineOptions)
def generate(
    context: typer.Context,
    engine: EngineOptions,
    sampling: SamplingOptions,
    beams: BeamOptions,
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
            help='A prompt per line, or JSON lines with {"prompt": ...} or {"messages": ...} and '
            'fields of their own, as for --output; "-" reads them from standard input.',
        ),
    ] = None,
    target: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            show_default=False,
            rich_help_panel=LONG_RUN,
            help='Append a JSON line for each line of --input as it finishes. A line has a "prompt" '
            '(text or token ids) or "messages", an "id" if you like, and any sampling field, '
            'such as "temperature", in place of the option; or it is a line of an OpenAI batch. '
            "The same command goes on where the last one was stopped; a line that cannot run gets "
            "a record with its error.",
        ),
    ] = None,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite",
            rich_help_panel=LONG_RUN,
            help="Begin --output afresh, losing what it has.",
        ),
    ] = False,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            show_default="MODEL",
            rich_help_panel=LONG_RUN,
            help="What lines of an OpenAI batch may call the model; repeatable.",
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
    beam_params = beams.beam_params(sampling, context)
    params: Params = beam_params or sampling.sampling_params()
    left_to_model = sampling.left_to_model if beam_params is None else frozenset()
    if target is None and not as_json:
        for option in ("logprobs", "prompt_logprobs"):
            if getattr(sampling, option) is not None:
                raise typer.BadParameter(
                    "is not shown in plain text; add --json, or --output",
                    param_hint=f"--{option.replace('_', '-')}",
                )
    if target is not None:
        if source in (None, "-") or prompts or as_json:
            raise typer.BadParameter(
                "goes with an --input FILE that can be read again, and without PROMPT and --json",
                param_hint="--output",
            )
        from rooftile.cli.batch.run import BatchOptions, run_file

        options = BatchOptions(
            params, chat, system, overwrite, tuple(served_model_name or ()), left_to_model
        )
        run_file(engine, sampling.seed, Path(str(source)), target, options)
        return
    if overwrite or served_model_name:
        name = "--overwrite" if overwrite else "--served-model-name"
        raise typer.BadParameter("needs --output", param_hint=name)

    asked = collect_prompts(prompts, source, params)
    if not as_json:
        for each in asked:
            _check_shown(each)
    llm = loading.load_llm(engine, sampling.seed)
    params = with_recommended(params, left_to_model, llm.sampling_defaults)
    asked = [each.with_defaults(params) for each in asked]
    in_chat = has_template(llm) if chat is None else chat
    if system is not None and not in_chat:
        raise ValueError(
            f"--system needs a chat template and {engine.model} has none; put it into the prompt"
        )
    requests = [prompts_of(llm, each.body, in_chat, system)[0] for each in asked]
    params_of_each: list[Any] = [each.body.params for each in asked]

    if len(asked) == 1 and not as_json and getattr(params_of_each[0], "n", None) == 1:
        output = stream_text(llm.stream(requests[0], params_of_each[0]), sys.stdout)
        failed = report_failures([output])
    else:
        # Lines change fields of the defaults, not their class.
        answer = llm.generate if beams.beam_width is None else llm.beam_search
        outputs = answer(requests, params_of_each, progress=sys.stderr.isatty())
        for position, (each, output) in enumerate(zip(asked, outputs, strict=True)):
            if as_json:
                record = {"index": position, **each.record(), **output_record(output)}
                print(json.dumps(record, ensure_ascii=not takes_unicode(sys.stdout)))
            else:
                _print_text(position, len(asked), each.shown, output)
        failed = report_failures(outputs)
    sys.stdout.flush()
    if failed:
        raise typer.Exit(1)


def _check_shown(asked: Asked) -> None:
    """Raises: ValueError for what a line asks for and plain text has no place for."""
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(asked.body.params, name, None) is not None:
            raise ValueError(
                f"{name} of a line is not shown in plain text; add --json, or --output"
            )


def report_failures(outputs: list[RequestOutput]) -> bool:
    """Print the errors of failed answers; whether there are any."""
    errors = [answer.error for output in outputs for answer in output.outputs if answer.error]
    for error in errors:
        print_error(error)
    return bool(errors)


def _print_text(position: int, count: int, prompt: str, output: RequestOutput) -> None:
    if count > 1:
        line = " ".join(prompt.split())
        shown = line if len(line) <= 60 else f"{line[:59]}…"
        print(f"{'' if position == 0 else chr(10)}=== {position + 1}/{count}: {shown}")
    for answer in output.outputs:
        if len(output.outputs) > 1:
            score = "" if answer.score is None else f", score {answer.score:.3f}"
            print(f"--- answer {answer.index + 1} of {len(output.outputs)}{score}")
        print(answer.text)
