"""The chat server's routes.

    POST /chat/completions      nanochat's streaming protocol, see `chat_api`
    POST /v1/chat/completions   OpenAI's, see `openai_api`; also /v1/completions and /v1/models
    GET  /                      the page
    GET  /health                {"status", "ready", "model", "running", "waiting", "num_gpus",
                                "available_workers"}
    GET  /stats                 the model, limits, defaults, queue, rates and workers
    GET  /metrics               for Prometheus
    GET  /openapi.json          this, for programs

HEAD is answered wherever GET is, without a body.
A refusal has status 400 (over a limit), 401 (no key), 413 (too big), 415 (not JSON), 422 (not of
the form) or 503 (too many requests wait; Retry-After says when to retry). If OpenAI's routes do not
stream, an answer that fails is a 500, and a 504 if it took too long. Error messages never quote
what users wrote, and it is logged only with `--log contents`.
"""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response

from nanochat_core.server.api import chat_api, openai_api
from nanochat_core.server.api.http import refusal
from nanochat_core.server.api.openapi import FormRoute, responses
from nanochat_core.server.api.schema import DEFAULTS, LIMITS, RequestError
from nanochat_core.server.middleware import Guard
from nanochat_core.server.page.page import page_csp, page_html
from nanochat_core.server.service import Service
from nanochat_core.server.workers.pool import ServiceUnavailable

_STREAM = "text/event-stream"


def make_app(service: Service) -> FastAPI:
    """Make the server of `service`; its engine processes end with the server."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await service.stop()

    app = FastAPI(title="nanochat", version="1", docs_url=None, redoc_url=None, lifespan=lifespan)
    app.router.redirect_slashes = False  # a redirect would lose a key, or a body
    app.state.service = service
    _add_pages(app, service)
    for path, route, answer in (
        ("/chat/completions", chat_api.chat_completions, Response),  # a stream alone
        ("/v1/chat/completions", openai_api.chat_completions, JSONResponse),
        ("/v1/completions", openai_api.completions, JSONResponse),
    ):
        app.router.add_api_route(
            path,
            route,
            methods=["POST"],
            response_class=answer,
            responses=responses(path, _STREAM),
            route_class_override=FormRoute,
        )
    for path, route in (
        ("/v1/models", openai_api.models),
        ("/v1/models/{name:path}", openai_api.model),
    ):
        app.add_api_route(path, route, methods=["GET"], responses=responses(path))
    _add_refusals(app)
    app.add_middleware(Guard, service=service)
    if service.rules.origins:
        # Added last and so outermost: preflight requests carry no key, and refusals need the
        # headers too.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=service.rules.origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],  # OpenAI's library for browsers sends a dozen of its own
        )
    return app


def _add_pages(app: FastAPI, service: Service) -> None:
    page, policy = page_html(), page_csp()

    @app.get("/", include_in_schema=False)
    async def show_page() -> HTMLResponse:
        headers = {"Content-Security-Policy": policy, "Cache-Control": "no-cache"}
        return HTMLResponse(page, headers=headers)

    @app.get("/health")
    async def health() -> dict[str, Any]:
        pool = service.pool
        return {
            "status": "ok" if pool.is_ready else "starting",
            "ready": pool.is_ready,
            "model": service.name,
            "running": service.running,
            "waiting": service.waiting,
            "num_gpus": len(pool.workers),  # this name and the next are nanochat's
            "available_workers": pool.available,
        }

    @app.get("/stats", responses=responses("/stats"))
    async def stats() -> dict[str, Any]:
        pool = service.pool
        return {
            "model": service.name,
            "parameters": pool.facts.parameters,
            "context": pool.facts.sequence_len,
            "precision": pool.facts.precision,
            "runner": pool.facts.runner,
            "defaults": DEFAULTS,
            "limits": LIMITS,
            "queue": {
                "running": pool.running,
                "waiting": pool.waiting,
                "slots": pool.num_slots,
                "max_waiting": pool.max_waiting * len(pool.workers),
            },
            "tokens_per_second": round(service.metrics.tokens_per_second, 1),
            "total_workers": len(pool.workers),
            "available_workers": pool.available,
            "busy_workers": len(pool.workers) - pool.available,
            "workers": [
                {
                    "gpu": worker.index,
                    "gpu_id": worker.index,
                    "device": worker.spec.device,
                    "ready": worker.facts is not None,
                    "busy": worker.busy,
                    "restarts": worker.restarts,
                }
                for worker in pool.workers
            ],
        }

    @app.get("/metrics", response_class=PlainTextResponse, responses=responses("/metrics"))
    async def metrics() -> Response:
        counts = service.metrics
        counts.running.set(service.running)
        counts.waiting.set(service.waiting)
        counts.restarts.set(service.restarts)
        return Response(counts.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _add_refusals(app: FastAPI) -> None:
    @app.exception_handler(RequestError)
    async def refuse(request: Request, error: RequestError) -> JSONResponse:
        return refusal(request.url.path, error.status, str(error), param=error.param)

    @app.exception_handler(ServiceUnavailable)
    async def refuse_for_now(request: Request, error: ServiceUnavailable) -> JSONResponse:
        return refusal(request.url.path, 503, f"{error}; try again in a moment")

    # The framework's own refusals, such as 404 and 405, in the shape of the API.
    @app.exception_handler(HTTPException)
    async def refuse_route(request: Request, error: HTTPException) -> JSONResponse:
        detail = error.detail.lower()
        return refusal(request.url.path, error.status_code, detail, headers=error.headers)
