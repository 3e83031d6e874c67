"""What FastAPI writes into /openapi.json: the form of each request and the shape of refusals."""

from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias, get_type_hints

from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from nanochat_core.server.api.http import read_body
from nanochat_core.server.api.schema import parse

Responses: TypeAlias = dict[int | str, dict[str, Any]]


class Refusal(BaseModel):
    """An error of nanochat's own routes."""

    detail: str


class OpenAIErrorFields(BaseModel):
    """The fields of an error of OpenAI's."""

    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIError(BaseModel):
    """An error of OpenAI's routes."""

    error: OpenAIErrorFields


class FormRoute(APIRoute):
    """A route `async def route(request, form: SomeForm)`.

    FastAPI documents the form; the body is read within its limits, and refused without quoting it.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return what answers a request; FastAPI calls this once."""
        form = get_type_hints(self.endpoint)["form"]

        async def handle(request: Request) -> Response:
            return await self.endpoint(request, parse(form, await read_body(request)))

        return handle


def responses(path: str, *kinds: str) -> Responses:
    """Return the refusals of the route at `path`, and the types of its answers besides JSON."""
    model = OpenAIError if path.startswith("/v1") else Refusal
    refused = {"description": "refused, the message says why", "model": model}
    failed = {"description": "failed; after a 503 retry in Retry-After seconds", "model": model}
    answers: Responses = {200: {"content": {kind: {} for kind in kinds}}} if kinds else {}
    return answers | {"4XX": refused, "5XX": failed}
