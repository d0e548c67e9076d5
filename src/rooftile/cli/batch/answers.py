"""The records of a long run, in Rooftile's own format and in that of the OpenAI API."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rooftile.cli.batch.lines import Line
from rooftile.cli.batch.results import openai_id
from rooftile.cli.records import finite, logprob_records, output_record

if TYPE_CHECKING:
    from rooftile.engine.outputs import CompletionOutput, RequestOutput
    from rooftile.engine.request_body import RequestBody
    from rooftile.models.tokenizer import Tokenizer
    from rooftile.server.tokens import TokenTexts


class UnknownModel(ValueError):
    """A body names a model that is not the one that runs."""


class Answers:
    """Makes records; knows what the model is called and how its tokens read."""

    def __init__(self, model_name: str, tokenizer: Tokenizer | None) -> None:
        self._model_name = model_name
        self._tokenizer = tokenizer

    @cached_property
    def _texts(self) -> TokenTexts:
        from rooftile.server.tokens import TokenTexts

        return TokenTexts(self._tokenizer)

    def own(self, line: Line, name: str | int | None, output: RequestOutput) -> dict[str, Any]:
        errors = [answer.error for answer in output.outputs if answer.error]
        return {
            **_own_frame(line, name),
            "error": errors[0] if errors else None,
            **output_record(output),
        }

    def openai(
        self, line: Line, custom_id: str, body: RequestBody, outputs: Sequence[RequestOutput]
    ) -> dict[str, Any]:
        errors = [answer.error for output in outputs for answer in output.outputs if answer.error]
        if errors:
            return openai_failure(line, custom_id, errors[0], 500)
        answer = {
            "id": f"{'chatcmpl' if body.is_chat else 'cmpl'}-{openai_id(line)}",
            "object": "chat.completion" if body.is_chat else "text_completion",
            "created": int(time.time()),
            "model": body.model or self._model_name,
            "choices": self._choices(body, outputs),
            "usage": _usage(outputs),
        }
        response = {"status_code": 200, "request_id": openai_id(line), "body": answer}
        return {
            "id": openai_id(line),
            "custom_id": custom_id,
            "response": response,
            "error": None,
        }

    def _choices(self, body: RequestBody, outputs: Sequence[RequestOutput]) -> list[dict[str, Any]]:
        choices: list[dict[str, Any]] = []
        for output in outputs:
            for answer in output.outputs:
                content: dict[str, Any] = {"text": answer.text}
                if body.is_chat:
                    content = {
                        "message": {"role": "assistant", "content": answer.text, "refusal": None}
                    }
                choice = {
                    "index": len(choices),
                    **content,
                    "logprobs": self._logprobs(body, answer),
                    "finish_reason": answer.finish_reason,
                    "stop_reason": answer.stop_reason,
                }
                if answer.score is not None:
                    choice["score"] = finite(answer.score)
                if output.prompt_logprobs is not None:
                    choice["prompt_logprobs"] = logprob_records(output.prompt_logprobs)
                choices.append(choice)
        return choices

    def _logprobs(self, body: RequestBody, answer: CompletionOutput) -> dict[str, Any] | None:
        """The two formats of the API, of the tokens that are in the text."""
        if answer.logprobs is None:
            return None
        from rooftile.server.choices import Choice

        skip = body.params.skip_special_tokens
        hidden = self._texts.special_ids if skip else frozenset()
        news = Choice(answer.index, answer, self._texts, hidden).news()
        entries = [] if news is None else news.entries or []
        if body.is_chat:
            return {
                "content": [
                    {
                        **self._token(entry.token_id, entry.logprob or 0.0),
                        "top_logprobs": [self._token(*likely) for likely in entry.top],
                    }
                    for entry in entries
                ],
                "refusal": None,
            }
        by_text: list[dict[str, float]] = []
        for entry in entries:  # of tokens with equal text the likelier counts
            by_text.append({})
            for token, logprob in (*entry.top, (entry.token_id, entry.logprob or 0.0)):
                by_text[-1].setdefault(self._texts.text_of(token), logprob)
        return {
            "tokens": [self._texts.text_of(entry.token_id) for entry in entries],
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": by_text,
            "text_offset": [entry.offset for entry in entries],
        }

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self._texts.bytes_of(token_id)
        return {
            "token": self._texts.text_of(token_id),
            "logprob": finite(logprob),
            "bytes": list(raw) if raw else None,
        }


def failure(
    line: Line, value: dict[str, Any] | None, openai: bool, error: ValueError
) -> dict[str, Any]:
    """Of a line that could not run. value: the line, where it could be read."""
    message = f"line {line.number}: {error}"
    if openai:
        name = None if value is None else value.get("custom_id")
        return openai_failure(line, name, message, 404 if isinstance(error, UnknownModel) else 400)
    name = None if value is None else value.get("id")
    return {**_own_frame(line, name), "error": message, "outputs": []}


def openai_failure(line: Line, custom_id: Any, message: str, status: int) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": message, "type": kind, "param": None, "code": None}
    response = {
        "status_code": status,
        "request_id": openai_id(line),
        "body": {"error": error},
    }
    return {
        "id": openai_id(line),
        "custom_id": custom_id,
        "response": response,
        "error": {"code": kind, "message": message},
    }


def _own_frame(line: Line, name: Any) -> dict[str, Any]:
    return {"id": name, "index": line.index, "line": line.number, "digest": line.digest}


def _usage(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Each prompt counts once, whatever n is."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    completion = sum(len(answer.token_ids) for output in outputs for answer in output.outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {
            "cached_tokens": sum(output.num_cached_tokens for output in outputs)
        },
    }
