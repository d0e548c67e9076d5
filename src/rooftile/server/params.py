"""From a request's fields to the engine's parameters."""

from __future__ import annotations

from rooftile.engine.grammar import ANY_OBJECT, GrammarProcessor, JsonSpec
from rooftile.engine.params import Params
from rooftile.server.errors import bad_request
from rooftile.server.json_schema import checked_schema
from rooftile.server.protocol.response_format import JsonSchemaFormat, TextFormat
from rooftile.server.protocol.sampling import SamplingFields
from rooftile.server.service import Service


async def engine_params(
    service: Service,
    request: SamplingFields,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
) -> Params:
    """Raises: ApiError 400 for fields out of range, or a schema that cannot be used."""
    if request.use_beam_search:
        room = service.llm.limits.max_model_len
        return request.beam_search_params(room if max_tokens is None else max_tokens)
    return request.sampling_params(
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        logits_processor=await _grammar(service, request),
        defaults=service.llm.sampling_defaults,
    )


async def _grammar(service: Service, request: SamplingFields) -> GrammarProcessor | None:
    wanted = request.response_format
    if wanted is None or isinstance(wanted, TextFormat):
        return None
    for name in ("ignore_eos", "min_tokens"):
        if getattr(request, name):
            raise bad_request(
                f"{name} does not go together with response_format {wanted.type}, whose end is "
                f"where the JSON ends",
                name,
            )
    spec = ANY_OBJECT
    if isinstance(wanted, JsonSchemaFormat):
        text = checked_schema(wanted.json_schema.schema_)
        spec = JsonSpec(text, bool(wanted.json_schema.strict))
    compiler = service.grammars
    if compiler is None:
        raise bad_request("this model has no tokenizer, so it writes no JSON", "response_format")
    processor = GrammarProcessor(spec)
    try:
        await service.bind_grammar(processor, compiler)
    except (ValueError, NotImplementedError) as error:
        raise bad_request(str(error), "response_format") from None
    return processor
