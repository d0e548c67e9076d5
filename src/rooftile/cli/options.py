"""Options that several commands share, as dataclasses: declared once, typed, and handed on whole."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

if TYPE_CHECKING:
    from rooftile.engine.params import SamplingParams

SAMPLING = "Sampling"
ENGINE = "Engine"


def _sampling(*names: str, help: str, **settings: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=SAMPLING, **settings)


def _engine(*names: str, help: str, **settings: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=ENGINE, **settings)


@dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """How one answer is sampled."""

    max_tokens: Annotated[int, _sampling(help="Most new tokens of an answer.")] = 512
    temperature: Annotated[
        float, _sampling("--temperature", "-t", help="0 takes the likeliest token each time.")
    ] = 0.7
    top_p: Annotated[
        float, _sampling(help="Sample among the likeliest tokens that hold this probability.")
    ] = 1.0
    top_k: Annotated[int, _sampling(help="Sample among this many tokens (0: all).")] = 0
    min_p: Annotated[
        float, _sampling(help="Drop tokens less likely than this share of the likeliest.")
    ] = 0.0
    repetition_penalty: Annotated[
        float, _sampling(help="Above 1 disfavours tokens of prompt and answer.")
    ] = 1.0
    presence_penalty: Annotated[
        float, _sampling(help="Subtracted once for a token that the answer has.")
    ] = 0.0
    frequency_penalty: Annotated[
        float, _sampling(help="Subtracted for each time the answer has the token.")
    ] = 0.0
    logit_bias: Annotated[
        list[str] | None, _sampling(metavar="ID=BIAS", help="Added to a token's logit; repeatable.")
    ] = None
    seed: Annotated[
        int | None, _sampling(help="Same seed, same text. Also seeds --random-weights.")
    ] = None
    min_tokens: Annotated[int, _sampling(help="Fewest new tokens before a stop counts.")] = 0
    stop: Annotated[
        list[str] | None, _sampling(metavar="TEXT", help="End before this text; repeatable.")
    ] = None
    stop_token_id: Annotated[
        list[int] | None, _sampling(metavar="ID", help="End at this token; repeatable.")
    ] = None
    ignore_eos: Annotated[
        bool, _sampling("--ignore-eos", help="Go on past the model's end-of-text token.")
    ] = False
    keep_special_tokens: Annotated[
        bool, _sampling("--keep-special-tokens", help="Show special tokens in the text.")
    ] = False

    def sampling_params(self, **more: Any) -> SamplingParams:
        from rooftile.engine.params import SamplingParams

        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=parse_logit_bias(self.logit_bias),
            seed=self.seed,
            min_tokens=self.min_tokens,
            stop=self.stop,
            stop_token_ids=tuple(self.stop_token_id or ()),
            ignore_eos=self.ignore_eos,
            skip_special_tokens=not self.keep_special_tokens,
            **more,
        )


@dataclass(frozen=True, kw_only=True)
class SamplingOptions(AnswerOptions):
    """How the answers to a prompt are sampled: one or several of them, with log-probabilities."""

    n: Annotated[int, _sampling("-n", "--n", help="Answers per prompt.")] = 1
    logprobs: Annotated[
        int | None,
        _sampling(help="Log-probabilities of the token and this many likeliest ones (--json)."),
    ] = None

    def sampling_params(self, **more: Any) -> SamplingParams:
        return super().sampling_params(n=self.n, logprobs=self.logprobs, **more)


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The model and the memory and batch limits of the engine that runs it."""

    model: Annotated[
        str,
        typer.Option(
            "--model",
            "-m",
            metavar="MODEL",
            show_default=False,
            help="A GGUF file, a directory in Hugging Face format, a hub id, `demo`, or "
            "`bench:NAME` (a benchmark's config, with --random-weights).",
        ),
    ]
    dtype: Annotated[str, _engine(metavar="DTYPE", help="auto, float32, bfloat16 or float16.")] = (
        "auto"
    )
    device: Annotated[str, _engine(help="auto or cpu.")] = "auto"
    page_size: Annotated[int, _engine(help="Tokens per KV page, a power of two from 1 to 256.")] = (
        16
    )
    max_num_seqs: Annotated[int, _engine(help="Most sequences in one step.")] = 256
    max_num_batched_tokens: Annotated[int, _engine(help="Most tokens in one step.")] = 2048
    max_model_len: Annotated[
        int | None, _engine(help="Most tokens of prompt and answer (default: the model's).")
    ] = None
    num_pages: Annotated[
        int | None, _engine(help="KV pages (default: from --kv-memory-share).")
    ] = None
    kv_memory_share: Annotated[
        float, _engine(help="Share of the free memory that KV pages may take.")
    ] = 0.3
    prefix_cache: Annotated[
        bool,
        _engine("--prefix-cache/--no-prefix-cache", help="Reuse the KV pages of equal prefixes."),
    ] = True
    random_weights: Annotated[
        bool, _engine("--random-weights", help="The architecture of MODEL with random weights.")
    ] = False


def with_options(**groups: type[Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Replace a command's parameters that are option dataclasses by their fields.

    `@with_options(engine=EngineOptions)` on `def command(prompt, engine)` gives typer a command
    with `prompt` and every field of `EngineOptions`, and the function an `EngineOptions`.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        own = inspect.signature(function, eval_str=True).parameters
        parameters = [p for name, p in own.items() if name not in groups]
        for group in groups.values():
            hints = get_type_hints(group, include_extras=True)
            parameters += [
                inspect.Parameter(
                    field.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=inspect.Parameter.empty
                    if field.default is dataclasses.MISSING
                    else field.default,
                    annotation=hints[field.name],
                )
                for field in dataclasses.fields(group)
            ]
        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
        parameters.sort(key=lambda p: p.default is not inspect.Parameter.empty)  # required first

        @wraps(function)
        def command(**values: Any) -> Any:
            for name, group in groups.items():
                fields = {f.name: values.pop(f.name) for f in dataclasses.fields(group)}
                values[name] = group(**fields)
            return function(**values)

        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        return command

    return decorate


def parse_logit_bias(pairs: list[str] | None) -> dict[int, float] | None:
    """`["42=-5.5"]` -> `{42: -5.5}`."""
    if not pairs:
        return None
    bias: dict[int, float] = {}
    for pair in pairs:
        token, _, value = pair.partition("=")
        try:
            bias[int(token)] = float(value)
        except ValueError:
            raise typer.BadParameter(
                f"{pair!r} is not ID=BIAS, such as 42=-5.5", param_hint="--logit-bias"
            ) from None
    return bias
