"""`nanochat serve`: a model behind a web page and an HTTP API."""

from typing import Annotated

from cyclopts import Parameter

from flows.commands.options import ModelName, Where
from flows.references import open_model


def serve(
    model: ModelName,
    /,
    *,
    host: Annotated[str, Parameter(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, Parameter(help="Port to listen on.")] = 8000,
    where: Where = Where(),  # noqa: B008 - frozen
) -> int:
    """Serve a model: a chat page in the browser, and POST /chat/completions."""
    directory = open_model(where.open_store(), model, cache=where.cache)
    raise NotImplementedError(directory, host, port)
