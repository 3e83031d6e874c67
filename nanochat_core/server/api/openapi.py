"""The OpenAPI document of the server; its request schemas come from the forms that check them."""

from collections.abc import Sequence
from typing import Any, TypeAlias

from pydantic.json_schema import models_json_schema

from nanochat_core.server.api.schema import Form

Responses: TypeAlias = dict[int | str, dict[str, Any]]


def _object(**properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "required": list(properties), "properties": properties}


_TEXT, _TEXT_OR_NULL = {"type": "string"}, {"type": ["string", "null"]}
_DETAIL = _object(detail=_TEXT)
_OPENAI_ERROR = _object(
    error=_object(message=_TEXT, type=_TEXT, param=_TEXT_OR_NULL, code=_TEXT_OR_NULL)
)
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


def _refusals(statuses: Sequence[int], schema: dict[str, Any]) -> Responses:
    content = {"application/json": {"schema": schema}}
    return {status: {"description": _REASONS[status], "content": content} for status in statuses}


JSON: Responses = {200: {"description": "a JSON object", "content": _OBJECT}}
ERROR: Responses = _refusals([401], _DETAIL)


def describe(path: str, form: type[Form] | None = None) -> dict[str, Any]:
    """Return add_api_route's arguments for a route that takes `form`; None: it takes no body."""
    is_openai = path.startswith("/v1")
    error = _OPENAI_ERROR if is_openai else _DETAIL
    if form is None:
        return {"response_model": None, "responses": JSON | _refusals([401, 404], error)}
    # nanochat's route reports a failed answer in its stream; OpenAI's know no 422.
    statuses = [400, 401, 413, 415, 503, *([500, 504] if is_openai else [422])]
    kinds = {**(_OBJECT if is_openai else {}), "text/event-stream": {}}
    answers: Responses = {200: {"description": "the answer", "content": kinds}}
    schema = {"$ref": f"#/components/schemas/{form.__name__}"}
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    return {
        "response_model": None,
        "responses": answers | _refusals(statuses, error),
        "openapi_extra": {"requestBody": body},
    }


def schemas(forms: Sequence[type[Form]]) -> dict[str, Any]:
    """Return the component schemas that the routes of `forms` refer to."""
    template = "#/components/schemas/{model}"
    models = [(form, "validation") for form in forms]
    return models_json_schema(models, ref_template=template)[1]["$defs"]  # pyright: ignore[reportArgumentType]
