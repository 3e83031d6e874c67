"""The command line of `python -m nanochat_core.server`."""

import argparse
from pathlib import Path
from typing import get_args

from nanochat_core.server.config import Log, Overflow, ServerConfig
from nanochat_core.server.launch import Device, Engines


def make_parser() -> argparse.ArgumentParser:
    """Make the parser; `nanochat serve` has the same options."""
    parser = argparse.ArgumentParser(
        prog="python -m nanochat_core.server", description="Serve a chat model and its page."
    )
    add = parser.add_argument
    rules = ServerConfig()
    add("model", type=Path, metavar="MODEL_DIR", help="a model directory")
    add("--port", type=int, default=8000, help="0: any free port")
    add("--host", default="127.0.0.1", help="0.0.0.0: reachable from elsewhere")
    add("--device", choices=get_args(Device), default=Engines.device)
    add("--workers", type=int, help="engine processes; default one for each GPU")
    precisions = "fp32, bf16, int8, model (its own) or auto: bf16 for large models on a CPU"
    add("--precision", default=Engines.precision, help=precisions)
    add(
        "--slots",
        type=int,
        dest="num_slots",
        help="answers that one engine process writes at the same time",
    )
    waiting, seconds = rules.max_waiting, rules.max_seconds
    add("--max-waiting", type=int, default=waiting, help="answers that may wait for a slot")
    add("--max-seconds", type=float, default=seconds, help="for one answer, its wait included")
    add("--overflow", choices=get_args(Overflow), default=rules.overflow, help="of the context")
    add("--key-file", type=Path, help="a file with the API keys to ask for, one a line")
    add("--trusted-host", action="append", default=[], help="a name this server goes by")
    add("--allow-origin", action="append", default=[], help="a web site that may ask")
    add("--log", choices=get_args(Log), default=rules.log)
    return parser
