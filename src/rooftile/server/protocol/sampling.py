"""The sampling fields of completions and chats, and the SamplingParams that they stand for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from rooftile.engine.params import BeamSearchParams, SamplingParams
from rooftile.engine.request_body import token_biases
from rooftile.server.errors import ApiError, bad_request
from rooftile.server.protocol.base import ClientModel
from rooftile.server.protocol.response_format import ResponseFormat

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rooftile.engine.params import LogitsProcessor

# Lists that are looked through at each token: their length is bounded, so that no client can slow
# down the others.
MAX_BIASES = 1024
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKENS = 256
MAX_BAD_WORDS = 64

LEAST_TEMPERATURE = 1e-4  # below, logits over temperature leave the range of float32

Integer = Annotated[int, Field(ge=-(2**63), lt=2**63)]
StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]

# Of other servers; by value, what is the same as leaving the field out.
UNSUPPORTED = {
    "allowed_token_ids": (),
    "documents": ([],),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "ebnf": ("",),
    "format": ("",),
    "grammar": ("",),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "image_data": ([],),
    "json_schema": (),
    "kv_transfer_params": (),
    "logits_processors": ([],),
    "lora": ([],),
    "lora_request": (),
    "max_length": (),
    "max_new_tokens": (),
    "min_keep": (0,),
    "mirostat": (0,),
    "mm_processor_kwargs": ({},),
    "n_indent": (0,),
    "n_predict": (-1,),
    "n_probs": (0,),
    "num_predict": (-1,),
    "options": ({},),
    "priority": (0,),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "regex": ("",),
    "repeat_penalty": (1,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "samplers": (),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    "structural_tag": (),
    "t_max_predict_ms": (0,),
    "tfs_z": (1,),
    "top_n_sigma": (-1,),
    "truncate_prompt_tokens": (),
    "typical_p": (1,),
    "vllm_xargs": ({},),
    "xtc_probability": (0,),
}


DEFAULT_BEAM_WIDTH = 4
BEAM_FIELDS = ("beam_width", "length_penalty", "early_stopping")
# Of fields that a search has no use for: the value that changes nothing.
NOT_WITH_BEAMS: dict[str, Any] = {
    "temperature": 0.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": {},
    "min_tokens": 0,
    "stop": [],
    "stop_token_ids": [],
    "bad_words": [],
    "logprobs": False,
    "echo": False,
    "response_format": None,
}


class StreamOptions(ClientModel):
    include_usage: bool | None = None


class SamplingFields(ClientModel):
    unsupported: ClassVar = UNSUPPORTED

    model: str | None = None
    n: Integer | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Integer | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=MAX_BIASES)] | None = None
    seed: Integer | None = None
    max_tokens: Integer | None = None
    min_tokens: Integer | None = None
    stop: (
        Annotated[str, Field(max_length=MAX_STOP_CHARACTERS)]
        | Annotated[list[StopText], Field(max_length=MAX_STOPS)]
        | None
    ) = None
    stop_token_ids: Annotated[list[Integer], Field(max_length=MAX_STOP_TOKENS)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    bad_words: Annotated[list[StopText], Field(max_length=MAX_BAD_WORDS)] | None = None
    response_format: ResponseFormat | None = None
    use_beam_search: bool | None = None
    beam_width: Integer | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    user: str | None = None
    cache_salt: str | None = None

    def check_stream_options(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options needs stream: true", "stream_options")

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def sampling_params(
        self,
        *,
        max_tokens: int | None,
        logprobs: int | None,
        prompt_logprobs: int | None = None,
        logits_processor: LogitsProcessor | None = None,
        defaults: Mapping[str, Any],
    ) -> SamplingParams:
        """defaults: the model's, of fields that the request leaves out.

        Raises:
            ApiError: 400, naming the field that is out of range.
        """
        for name in BEAM_FIELDS:
            if getattr(self, name) is not None:
                raise bad_request(f"{name} needs use_beam_search: true", name)
        given: dict[str, Any] = {
            name: value
            for name in (
                "n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
                "frequency_penalty", "seed", "min_tokens", "stop_token_ids", "ignore_eos",
                "skip_special_tokens", "include_stop_str_in_output", "bad_words",
            )
            if (value := getattr(self, name)) is not None
        }  # fmt: skip
        chosen = {**defaults, **given}
        if 0 < chosen.get("temperature", 1.0) < LEAST_TEMPERATURE:
            chosen["temperature"] = LEAST_TEMPERATURE
        if chosen.get("top_k") == -1:  # other servers' way to say "all"
            chosen["top_k"] = 0
        try:
            return SamplingParams(
                logit_bias=None if self.logit_bias is None else token_biases(self.logit_bias),
                stop=self.stop or None,
                max_tokens=max_tokens,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
                logits_processor=logits_processor,
                **chosen,
            )
        except ValueError as error:
            raise refusal(error, type(self)) from None

    def beam_search_params(self, max_tokens: int) -> BeamSearchParams:
        """Raises: ApiError 400 for fields that a search has no use for, or out of range."""
        for name in NOT_WITH_BEAMS:
            if getattr(self, name, None) not in (None, False, NOT_WITH_BEAMS[name]):
                raise bad_request(f"{name} does not go together with use_beam_search", name)
        n = 1 if self.n is None else self.n
        if n < 1:
            raise bad_request(f"n is {n}; it must be a whole number of at least 1", "n")
        width = max(n, DEFAULT_BEAM_WIDTH) if self.beam_width is None else self.beam_width
        if n > width:
            raise bad_request(f"n is {n}; beam search has at most beam_width {width} results", "n")
        try:
            return BeamSearchParams(
                width=width,
                max_tokens=max_tokens,
                length_penalty=1.0 if self.length_penalty is None else self.length_penalty,
                early_stopping=self.early_stopping or False,
                n_best=n,
                ignore_eos=bool(self.ignore_eos),
                skip_special_tokens=self.skip_special_tokens is not False,
            )
        except ValueError as error:
            raise refusal(error, type(self)) from None


def refusal(error: ValueError, model: type[ClientModel]) -> ApiError:
    """A ValueError of the engine as a 400; its messages begin with the field that they are about."""
    field = str(error).partition(" ")[0].partition("[")[0]
    field = {"width": "beam_width", "n_best": "n"}.get(field, field)
    if field == "prompt" or str(error).startswith("the prompt"):
        field = "messages" if "messages" in model.model_fields else "prompt"
    return bad_request(str(error), field if field in model.model_fields else None)


def check_logprobs(name: str, count: int, most: int) -> int:
    if not 0 <= count <= most:
        raise bad_request(f"{name} is {count}; it must be a whole number from 0 to {most}", name)
    return count
