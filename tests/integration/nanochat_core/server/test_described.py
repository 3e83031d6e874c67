import re

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

# What no schema can say; the document's descriptions do.
UNWRITTEN = re.compile(
    "take turns|characters long, at most|choices, at most|tokens that the model does not know|"
    "context|best_of|has a value that this server does not support"
)
REFUSED = (400, 415, 422)


def test_the_document_describes_every_route_and_every_limit(live):
    found = httpx.get(f"{live.url}/openapi.json").json()
    assert set(found["paths"]) == {
        *("/chat/completions", "/health", "/metrics", "/stats", "/v1/chat/completions"),
        *("/v1/completions", "/v1/models", "/v1/models/{name}"),
    }
    schemas = found["components"]["schemas"]
    messages = schemas["ChatRequest"]["properties"]["messages"]
    assert (messages["minItems"], messages["maxItems"]) == (1, 500)
    assert schemas["Message"]["properties"]["content"]["maxLength"] == 8000


@pytest.mark.filterwarnings("ignore")  # of schemathesis' own dependencies
def test_schemathesis_finds_nothing(live):
    search(live, examples=4)


def search(live, *, examples):
    """Send so many examples to each route; fail on an answer that the document does not allow."""
    import schemathesis
    from schemathesis.checks import not_a_server_error
    from schemathesis.generation import GenerationMode
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        response_schema_conformance,
        status_code_conformance,
    )

    checks = [
        not_a_server_error,
        status_code_conformance,
        content_type_conformance,
        response_schema_conformance,
    ]
    modes = [GenerationMode.POSITIVE, GenerationMode.NEGATIVE]
    schema = schemathesis.openapi.from_url(f"{live.url}/openapi.json")
    seen = set()
    for found in schema.get_all_operations():
        operation = found.ok()

        @settings(
            max_examples=examples,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(case=st.one_of(map(operation.as_strategy, modes)))
        def check(case):
            answer = case.call_and_validate(checks=checks)
            if case.meta.generation.mode == GenerationMode.POSITIVE:
                assert answer.status_code not in REFUSED or UNWRITTEN.search(answer.text)

        check()
        seen.add(operation.path)
    assert len(seen) == 8
