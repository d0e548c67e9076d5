"""Options that several commands share, as dataclasses: declared once, typed, and handed on whole."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_type_hints

import typer

if TYPE_CHECKING:
    from rooftile.engine.params import BeamSearchParams, SamplingParams

SomeParams = TypeVar("SomeParams", "SamplingParams", "SamplingParams | BeamSearchParams")
SAMPLING = "Sampling"
BEAMS = "Beam search"
ENGINE = "Engine"


def _sampling(*names: str, help: str, **settings: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=SAMPLING, **settings)


def _beams(*names: str, help: str, **settings: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=BEAMS, **settings)


def _engine(*names: str, help: str, **settings: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=ENGINE, **settings)


# Of options that the model's files may recommend: what holds where neither they nor the user say.
FALLBACKS = {
    "temperature": 0.7,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}


def _recommended(name: str, *names: str, help: str) -> Any:
    return _sampling(*names, help=help, show_default=f"the model's, else {FALLBACKS[name]:g}")


@dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """How one answer is sampled."""

    max_tokens: Annotated[int, _sampling(help="Most new tokens of an answer.")] = 512
    temperature: Annotated[
        float | None,
        _recommended(
            "temperature", "--temperature", "-t", help="0 takes the likeliest token each time."
        ),
    ] = None
    top_p: Annotated[
        float | None,
        _recommended("top_p", help="Sample among the likeliest tokens that hold this probability."),
    ] = None
    top_k: Annotated[
        int | None, _recommended("top_k", help="Sample among this many tokens (0: all).")
    ] = None
    min_p: Annotated[
        float | None,
        _recommended("min_p", help="Drop tokens less likely than this share of the likeliest."),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        _recommended("repetition_penalty", help="Above 1 disfavours tokens of prompt and answer."),
    ] = None
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
    include_stop: Annotated[
        bool, _sampling("--include-stop", help="Keep the stop text that ended the answer.")
    ] = False
    stop_token_id: Annotated[
        list[int] | None, _sampling(metavar="ID", help="End at this token; repeatable.")
    ] = None
    bad_word: Annotated[
        list[str] | None, _sampling(metavar="TEXT", help="Never generate this; repeatable.")
    ] = None
    ignore_eos: Annotated[
        bool, _sampling("--ignore-eos", help="Go on past the model's end-of-text token.")
    ] = False
    keep_special_tokens: Annotated[
        bool, _sampling("--keep-special-tokens", help="Show special tokens in the text.")
    ] = False

    @property
    def left_to_model(self) -> frozenset[str]:
        """Fields of SamplingParams that the user has not set and the model's files may."""
        return frozenset(name for name in FALLBACKS if getattr(self, name) is None)

    def sampling_params(self, **more: Any) -> SamplingParams:
        """As far as it is known before the model is loaded: see `with_recommended`."""
        from rooftile.engine.params import SamplingParams

        recommended: dict[str, Any] = {
            name: fallback if (value := getattr(self, name)) is None else value
            for name, fallback in FALLBACKS.items()
        }
        return SamplingParams(
            max_tokens=self.max_tokens,
            **recommended,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=parse_logit_bias(self.logit_bias),
            seed=self.seed,
            min_tokens=self.min_tokens,
            stop=self.stop,
            include_stop_str_in_output=self.include_stop,
            stop_token_ids=tuple(self.stop_token_id or ()),
            bad_words=tuple(self.bad_word or ()),
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
    prompt_logprobs: Annotated[
        int | None,
        _sampling(
            help="The same for the tokens of the prompt (--json); allows --max-tokens 0, which "
            "only scores the prompt."
        ),
    ] = None

    def sampling_params(self, **more: Any) -> SamplingParams:
        return super().sampling_params(
            n=self.n, logprobs=self.logprobs, prompt_logprobs=self.prompt_logprobs, **more
        )


# What a beam search shares with sampling. --seed is the engine's and the random weights', too.
SHARED_WITH_BEAMS = frozenset({"max_tokens", "ignore_eos", "keep_special_tokens", "seed"})


class EarlyStopping(str, Enum):
    NO = "no"
    YES = "yes"
    NEVER = "never"


@dataclass(frozen=True, kw_only=True)
class BeamOptions:
    """Beam search instead of sampling."""

    beam_width: Annotated[
        int | None,
        _beams(show_default=False, help="Search with this many beams instead of sampling."),
    ] = None
    n_best: Annotated[int, _beams(help="Answers per prompt, best first.")] = 1
    length_penalty: Annotated[
        float,
        _beams(
            help="A score is the sum of log-probabilities / length to this power; above 0 favours "
            "longer answers."
        ),
    ] = 1.0
    early_stopping: Annotated[
        EarlyStopping,
        _beams(
            help="End when as many answers as beams are finished (yes), when no beam can beat them "
            "at its present length (no), or at its longest (never)."
        ),
    ] = EarlyStopping.NO

    def beam_params(
        self, sampling: SamplingOptions, context: typer.Context
    ) -> BeamSearchParams | None:
        """What to search with, or None to sample.

        Raises:
            typer.BadParameter: an option that the search would ignore, or one of the search's
                without --beam-width.
        """
        from rooftile.engine.params import BeamSearchParams

        if self.beam_width is None:
            names = given_options(context, BeamOptions)
            if names:
                raise typer.BadParameter("needs --beam-width", param_hint=names)
            return None
        names = given_options(context, SamplingOptions, SHARED_WITH_BEAMS)
        if names:
            raise typer.BadParameter(
                "has no meaning in beam search (--beam-width); leave it out", param_hint=names
            )
        stopping: dict[EarlyStopping, bool | Literal["never"]] = {
            EarlyStopping.NO: False,
            EarlyStopping.YES: True,
            EarlyStopping.NEVER: "never",
        }
        return BeamSearchParams(
            width=self.beam_width,
            max_tokens=sampling.max_tokens,
            length_penalty=self.length_penalty,
            early_stopping=stopping[self.early_stopping],
            n_best=self.n_best,
            ignore_eos=sampling.ignore_eos,
            skip_special_tokens=not sampling.keep_special_tokens,
        )


def with_recommended(
    params: SomeParams, left_to_model: frozenset[str], recommended: Mapping[str, Any]
) -> SomeParams:
    """`params` with the model's values of those fields that are left to it."""
    chosen = {name: value for name, value in recommended.items() if name in left_to_model}
    return dataclasses.replace(params, **chosen)


def sampling_text(values: Mapping[str, float]) -> str:
    """Such as "temperature 0.6, top_p 0.95"."""
    return ", ".join(f"{name} {value:g}" for name, value in values.items())


def given_options(
    context: typer.Context, group: type[Any], except_for: frozenset[str] = frozenset()
) -> str:
    """The options of the group that the command was called with, as they are written."""
    fields = {field.name for field in dataclasses.fields(group)} - except_for
    return ", ".join(
        max(option.opts, key=len)
        for option in context.command.params
        if option.name in fields and _is_given(context, option.name)
    )


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


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
    quantization: Annotated[
        str, _engine(metavar="BITS", help="Of weights, on a CPU: none, int8 or int4.")
    ] = "none"
    device: Annotated[str, _engine(help="auto, cpu or cuda.")] = "auto"
    page_size: Annotated[int, _engine(help="Tokens per KV page, a power of two from 1 to 256.")] = (
        16
    )
    max_num_seqs: Annotated[int, _engine(help="Most sequences in one step.")] = 256
    max_num_batched_tokens: Annotated[
        int | None, _engine(help="Most tokens in one step (default: 2048 on a CPU, 8192 on a GPU).")
    ] = None
    max_model_len: Annotated[
        int | None, _engine(help="Most tokens of prompt and answer (default: the model's).")
    ] = None
    dual_chunk: Annotated[
        str | None,
        _engine(
            metavar="FIELDS",
            help="Dual chunk attention beyond the length that the model was trained for: numbers "
            "chunk_size=, local_size= and original=, separated by commas (docs/dual_chunk.md).",
        ),
    ] = None
    num_pages: Annotated[
        int | None, _engine(help="KV pages (default: from --kv-memory-share).")
    ] = None
    kv_memory_share: Annotated[
        float | None,
        _engine(
            help="Share of the free memory that KV pages may take (default: 0.3 on a CPU, 0.9 on a GPU)."
        ),
    ] = None
    # The negative name alone: two would cut the names of other options in 80 columns.
    no_prefix_cache: Annotated[
        bool, _engine("--no-prefix-cache", help="Do not reuse the KV pages of equal prefixes.")
    ] = False
    no_generation_config: Annotated[
        bool, _engine("--no-generation-config", help="Ignore the sampling in the model's files.")
    ] = False
    random_weights: Annotated[
        bool, _engine("--random-weights", help="The architecture of MODEL with random weights.")
    ] = False

    def settings(self) -> dict[str, Any]:
        """What `LLM` and `AsyncLLM` take, by its names there."""
        values = dataclasses.asdict(self)
        for name in ("prefix_cache", "generation_config"):
            values[name] = not values.pop(f"no_{name}")
        return values


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
