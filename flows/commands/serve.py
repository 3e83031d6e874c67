"""`nanochat serve`: a model behind a web page and an HTTP API."""

from typing import Annotated

from cyclopts import Parameter

from flows.commands.options import ModelName, Place
from flows.commands.terminal import print_warning
from flows.references import find_directory, open_model


def serve(
    model: ModelName,
    /,
    *,
    host: Annotated[
        str, Parameter(help="Address to listen on; 0.0.0.0 is reachable from elsewhere.")
    ] = "127.0.0.1",
    port: Annotated[int, Parameter(help="Port to listen on; 0 is any free one.")] = 8000,
    place: Place = Place(),  # noqa: B008 - frozen
) -> int:
    """Serve a model: a chat page in the browser, and POST /chat/completions. Ctrl-C stops it."""
    directory = open_model(place.open_store(), model, cache=place.cache, warn=print_warning)
    from nanochat_core.server.__main__ import serve as serve_directory

    name = directory.name if find_directory(model) else model
    serve_directory(directory, name=name, host=host, port=port)
    return 0
