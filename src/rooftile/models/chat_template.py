"""Chat templates: untrusted Jinja programs from a model's files, run in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache, lru_cache
from typing import Any


class ChatTemplate:
    """A model's template, or several by name ("default", and "tool_use" where tools are given).

    variables: what every rendering sees beside the messages, such as bos_token.
    """

    def __init__(self, source: str | Mapping[str, str], variables: Mapping[str, str]) -> None:
        self.sources = {"default": source} if isinstance(source, str) else dict(source)
        self.variables = dict(variables)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt's text for these messages, each with at least a "role".

        Raises:
            ValueError: messages of another form, or whatever the template objects to.
        """
        if isinstance(messages, (str, Mapping)) or not messages:
            raise ValueError(
                f"messages is {messages!r}; expected a non-empty list of objects with role and content"
            )
        for index, message in enumerate(messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise ValueError(
                    f"messages[{index}] is {message!r}; expected an object with role and content"
                )
        name = "tool_use" if tools and "tool_use" in self.sources else "default"
        if name not in self.sources:
            raise ValueError(
                f"the model has chat templates named {', '.join(self.sources)}, but no 'default'"
            )
        from jinja2 import TemplateError

        try:
            text: str = _compiled(self.sources[name]).render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                tools=tools,
                documents=None,
                **{**self.variables, **variables},
            )
            return text
        # A template is a program: with odd messages it fails in any of these ways.
        except (
            TemplateError,
            TypeError,
            KeyError,
            AttributeError,
            IndexError,
            ArithmeticError,
            RecursionError,
        ) as error:
            raise ValueError(
                f"the model's chat template refuses these messages: {error}"
            ) from error


@lru_cache(maxsize=16)
def _compiled(source: str) -> Any:
    """The template, ready to render: compiling takes many times as long as rendering."""
    return _environment().from_string(source)


@cache
def _environment() -> Any:
    # jinja2 takes 0.1 s to import, which only chats need.
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %}…{% endgeneration %} marks what to train on: here only its body counts."""

        tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

        def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, indent: int | None = None, **options: Any) -> str:
        # Jinja's own filter escapes for HTML and sorts the keys; models were trained on neither.
        return json.dumps(
            value, ensure_ascii=options.pop("ensure_ascii", False), indent=indent, **options
        )

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment
