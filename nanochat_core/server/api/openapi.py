"""The OpenAPI document of the server; its request schemas come from the forms that check them."""

from collections.abc import Sequence
from typing import Any

from nanochat_core.server.api.schema import Form

_DETAIL = {
    "type": "object",
    "required": ["detail"],
    "properties": {"detail": {"type": "string"}},
}
_OPENAI_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_REASONS = {
    400: "over a limit, which the message names",
    401: "the API key is missing or wrong",
    404: "there is no such thing here",
    413: "the body is too big",
    415: "the content type is not application/json",
    422: "not of the expected form",
    500: "the engine failed while it wrote the answer",
    503: "too many requests wait; come back after Retry-After seconds",
    504: "the answer took longer than the server allows",
}
_OBJECT = {"application/json": {"schema": {"type": "object"}}}
Responses = dict[int | str, dict[str, Any]]


def _refusals(statuses: Sequence[int], schema: dict[str, Any]) -> Responses:
    content = {"application/json": {"schema": schema}}
    return {status: {"description": _REASONS[status], "content": content} for status in statuses}


JSON: Responses = {200: {"description": "a JSON object", "content": _OBJECT}}
ERROR: Responses = _refusals([401], _DETAIL)


def describe(path: str, form: type[Form] | None = None) -> dict[str, Any]:
    """Return add_api_route's arguments for a route that takes `form`; None: it takes no body."""
    is_openai = path.startswith("/v1")
    statuses = [401, 404] if form is None else [400, 401, 413, 415, 503]
    if form is not None:
        # nanochat's route reports a failed answer in its stream; OpenAI's know no 422.
        statuses += [500, 504] if is_openai else [422]
    kinds = {"text/event-stream": {}}
    if form is None:
        kinds = _OBJECT
    elif is_openai:
        kinds = {**_OBJECT, "text/event-stream": {}}
    answers: Responses = {200: {"description": "the answer", "content": kinds}}
    answers |= _refusals(statuses, _OPENAI_ERROR if is_openai else _DETAIL)
    body: dict[str, Any] = {}
    if form is not None:
        schema = {"$ref": f"#/components/schemas/{form.__name__}"}
        content = {"application/json": {"schema": schema}}
        body = {"requestBody": {"required": True, "content": content}}
    return {"response_model": None, "responses": answers, "openapi_extra": body}


def schemas(forms: Sequence[type[Form]]) -> dict[str, Any]:
    """Return the component schemas that the routes of `forms` refer to."""
    found: dict[str, Any] = {}
    for form in forms:
        schema = form.model_json_schema(ref_template="#/components/schemas/{model}")
        # pydantic nests the schemas of fields; in the document all stand side by side.
        found |= schema.pop("$defs", {})
        found[form.__name__] = schema
    return found
