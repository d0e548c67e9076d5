"""`rooftile generate --input FILE --output FILE`: long runs that survive bad lines and kills."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from rooftile.cli import loading
from rooftile.cli.batch.answers import Answers, UnknownModel, failure
from rooftile.cli.batch.lines import InputFile, Line, is_openai, parse
from rooftile.cli.batch.progress import RunProgress
from rooftile.cli.batch.results import Earlier, OutputFile
from rooftile.cli.conversation import Interrupt, ctrl_c_interrupts, has_template, prompts_of
from rooftile.cli.errors import print_error
from rooftile.cli.options import EngineOptions, with_recommended
from rooftile.cli.start import INTERRUPTED

if TYPE_CHECKING:
    from rooftile.engine.llm import LLM, Prompt
    from rooftile.engine.outputs import RequestOutput
    from rooftile.engine.params import Params
    from rooftile.engine.request_body import RequestBody


@dataclass(frozen=True)
class BatchOptions:
    """defaults: of whatever a line leaves out; those `left_to_model` are the model's where its files
    have them. chat: None goes by the model's template.
    """

    defaults: Params
    chat: bool | None = None
    system: str | None = None
    overwrite: bool = False
    model_names: tuple[str, ...] = ()
    left_to_model: frozenset[str] = frozenset()

    def settings(self, engine: EngineOptions) -> str:
        """What decides the answers beside the lines, as one text."""
        model = [
            *(engine.model, engine.dtype, engine.quantization),
            *(engine.max_model_len, engine.random_weights),
        ]
        kind = type(self.defaults).__name__
        left = [] if engine.no_generation_config else sorted(self.left_to_model)
        parts = [
            *(model, kind, asdict(self.defaults), left),
            *(self.chat, self.system, self.model_names),
        ]
        return json.dumps(parts, sort_keys=True)


def run_file(
    engine: EngineOptions, seed: int | None, source: Path, target: Path, options: BatchOptions
) -> None:
    """Answer every line of `source` that `target` has no answer of yet.

    Raises:
        ValueError: an input with an id twice, or an output that belongs to something else.
        typer.Exit: 1 if any line failed, now or earlier; 130 after ctrl-C.
    """
    if target.exists() and target.samefile(source):
        raise ValueError(f"--output {target} is the input itself; give another file")
    lines = InputFile(source, options.settings(engine))
    try:
        scan = lines.scan()
        with OutputFile(target, options.overwrite) as output:
            earlier = output.earlier(scan)
            if earlier.num_done:
                print(f"{earlier.num_done} lines were done before", file=sys.stderr, flush=True)
            progress = RunProgress(scan.num_requests, earlier.num_done, earlier.num_failed)
            if earlier.num_done == scan.num_requests:
                output.begin()
            else:
                llm = loading.load_llm(engine, seed)
                with ctrl_c_interrupts() as interrupt:
                    run = _Run(llm, engine.model, options, output, progress, interrupt, scan.openai)
                    output.begin()
                    with progress:
                        run.all(lines, earlier)
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    print(f"{progress.summary()}; results in {target}", file=sys.stderr)
    if progress.failed:
        if progress.first_error is not None:
            print_error(progress.first_error)
        raise typer.Exit(1)


@dataclass
class _Open:
    """A line whose requests are under way; a completion may ask for several prompts."""

    line: Line
    name: Any  # id or custom_id
    openai: bool
    body: RequestBody
    results: list[RequestOutput | ValueError | None] = field(default_factory=list)


class _Run:
    def __init__(
        self,
        llm: LLM,
        model: str,
        options: BatchOptions,
        output: OutputFile,
        progress: RunProgress,
        interrupt: Interrupt,
        openai: bool,
    ) -> None:
        self._llm = llm
        self._options = options
        self._defaults = with_recommended(
            options.defaults, options.left_to_model, llm.sampling_defaults
        )
        self._output = output
        self._progress = progress
        self._interrupt = interrupt
        self._openai = openai  # how lines are answered that cannot be read
        self._chat = has_template(llm) if options.chat is None else options.chat
        if options.system is not None and not self._chat:
            raise ValueError(
                f"--system needs a chat template and {model} has none; put it into the prompts"
            )
        self._names = options.model_names or (model, llm.model_name)
        self._answers = Answers(self._names[0], llm.tokenizer)
        self._owners: dict[int, tuple[_Open, int]] = {}  # of requests, by position in the run
        self._num_asked = 0

    def all(self, lines: InputFile, earlier: Earlier) -> None:
        tokens_before = self._llm.stats().generation_tokens

        def on_step() -> None:
            self._stop_if_interrupted()
            if self._progress.is_due():
                self._progress.update(self._llm.stats().generation_tokens - tokens_before)

        for position, result in self._llm.run(self._requests(lines, earlier), on_step=on_step):
            owner, at = self._owners.pop(position)
            owner.results[at] = result
            if all(each is not None for each in owner.results):
                self._finish(owner)
        self._progress.update(self._llm.stats().generation_tokens - tokens_before)

    def _requests(self, lines: InputFile, earlier: Earlier) -> Iterator[tuple[Prompt, Params]]:
        """The requests of all lines that are not done; a bad line is answered on the spot."""
        for line in lines:
            self._stop_if_interrupted()
            if line.number <= len(earlier.done) and earlier.done[line.number - 1]:
                continue
            value: dict[str, Any] | None = None
            try:
                value = line.read()
                body = parse(value, self._defaults)
                prompts = self._prompts(body, is_openai(value))
            except ValueError as error:
                self._refuse(line, value, error)
                continue
            openai = is_openai(value)
            owner = _Open(line, value.get("custom_id" if openai else "id"), openai, body)
            owner.results = [None] * len(prompts)
            for at, prompt in enumerate(prompts):
                self._owners[self._num_asked] = owner, at
                self._num_asked += 1
                yield prompt, body.params

    def _prompts(self, body: RequestBody, openai: bool) -> list[Prompt]:
        if body.model is not None and body.model not in self._names:
            raise UnknownModel(
                f"there is no model {json.dumps(body.model)} here but {self._names[0]}; "
                f"--served-model-name gives it other names"
            )
        return prompts_of(self._llm, body, self._chat and not openai, self._options.system)

    def _finish(self, owner: _Open) -> None:
        refusals = [result for result in owner.results if isinstance(result, ValueError)]
        if refusals:
            value = {"custom_id" if owner.openai else "id": owner.name}
            self._refuse(owner.line, value, refusals[0])
            return
        outputs: Any = owner.results
        if owner.openai:
            record = self._answers.openai(owner.line, owner.name, owner.body, outputs)
        else:
            record = self._answers.own(owner.line, owner.name, outputs[0])
        self._write(record)

    def _refuse(self, line: Line, value: dict[str, Any] | None, error: ValueError) -> None:
        openai = self._openai if value is None else is_openai(value)
        self._write(failure(line, value, openai, error))

    def _write(self, record: dict[str, Any]) -> None:
        self._output.write(record)
        error = record["error"]
        self._progress.finished_line(error["message"] if isinstance(error, dict) else error)

    def _stop_if_interrupted(self) -> None:
        if self._interrupt.pressed:
            raise KeyboardInterrupt
