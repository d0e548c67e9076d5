"""/openapi.json describes what the server does: requests drawn from it get the answers it names."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from tests.server.live import LiveServer

schemathesis = pytest.importorskip("schemathesis")
schemathesis.checks.load_all_checks()
CHECKS = schemathesis.checks.CHECKS.get_by_names(
    [
        "not_a_server_error",
        "status_code_conformance",
        "content_type_conformance",
        "response_schema_conformance",
    ]
)

PATHS = ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/models",
         "/v1/models/{name}", "/health", "/version"]  # fmt: skip


def test_the_description_is_complete(server: LiveServer) -> None:
    with server.http() as http:
        schema = http.get("/openapi.json").json()
    assert set(PATHS) <= set(schema["paths"])
    known = schema["components"]["schemas"]
    for operations in schema["paths"].values():
        for operation in operations.values():
            for reference in _references(operation):
                assert reference.removeprefix("#/components/schemas/") in known
    for reference in _references(known):
        assert reference.removeprefix("#/components/schemas/") in known
    assert {"prompt", "max_tokens", "stream"} <= set(known["CompletionRequest"]["properties"])


def _references(node: Any) -> list[str]:
    if isinstance(node, dict):
        found = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
        return found + [r for value in node.values() for r in _references(value)]
    if isinstance(node, list):
        return [r for value in node for r in _references(value)]
    return []


@pytest.mark.parametrize("examples", [8, pytest.param(150, marks=pytest.mark.slow)])
@pytest.mark.parametrize("path", PATHS)
def test_requests_of_the_description(shared_server: LiveServer, path: str, examples: int) -> None:
    schema = schemathesis.openapi.from_url(f"{shared_server.url}/openapi.json")
    (operation,) = [o.ok() for o in schema.get_all_operations() if o.ok().path == path]

    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy())
    def run(case: Any) -> None:
        case.call_and_validate(checks=CHECKS, timeout=60)

    run()
    shared_server.assert_idle()


def test_streams_are_as_described(shared_server: LiveServer) -> None:
    schema = schemathesis.openapi.from_url(f"{shared_server.url}/openapi.json")
    for path, asked in (
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ):
        case = schema[path]["POST"].Case(
            body={**asked, "stream": True, "max_tokens": 2}, media_type="application/json"
        )
        response = case.call_and_validate(checks=CHECKS, timeout=60)
        assert response.headers["content-type"][0].startswith("text/event-stream")
