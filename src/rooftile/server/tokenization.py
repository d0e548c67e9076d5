"""POST /tokenize and /detokenize."""

from __future__ import annotations

from rooftile.server.conversation import encode_conversation
from rooftile.server.errors import bad_request
from rooftile.server.protocol.tokenization import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from rooftile.server.service import Service


async def tokenize(service: Service, request: TokenizeRequest) -> TokenizeResponse:
    """Raises: ApiError 400 for a text that cannot be encoded."""
    request.check()
    service.check_model(request.model)
    llm = service.llm
    messages = None if request.messages is None else request.template_input()

    def encode() -> list[int]:
        if messages is not None:
            return encode_conversation(service, llm, request, messages)
        if llm.tokenizer is None:
            raise bad_request("this model has no tokenizer", "prompt")
        # Of any length: somebody may want to know how much too long a text is.
        return llm.tokenizer.encode(request.prompt or "", request.add_special_tokens is not False)

    def answer() -> TokenizeResponse:
        tokens = encode()
        answer = TokenizeResponse(
            count=len(tokens), max_model_len=llm.limits.max_model_len, tokens=tokens
        )
        if request.return_token_strs:
            answer.token_strs = [service.texts.text_of(token) for token in tokens]
        return answer

    return await service.off_loop(answer)


async def detokenize(service: Service, request: DetokenizeRequest) -> DetokenizeResponse:
    """Raises: ApiError 400 for ids outside the vocabulary."""
    service.check_model(request.model)
    tokenizer, limits = service.llm.tokenizer, service.llm.limits
    if tokenizer is None:
        raise bad_request("this model has no tokenizer", "tokens")

    def answer() -> DetokenizeResponse:
        for token in request.tokens:
            if not 0 <= token < limits.vocab_size:
                raise bad_request(
                    f"tokens has {token}; the vocabulary is 0..{limits.vocab_size - 1}", "tokens"
                )
        return DetokenizeResponse(prompt=tokenizer.decode(request.tokens, False))

    return await service.off_loop(answer)
