"""Record the executions of a job: host, time, steps and cost of each, for the manifest.

A job that is stopped and resumed has several. They are provenance: no result depends on them.
"""

import importlib.metadata
import json
import socket
import subprocess
import time
from pathlib import Path

from flows.identity.manifest import Facts
from nanochat_core.job import Job
from nanochat_core.runtime.progress import read_events, read_groups


def append_segment(job: Job, *, processes: int, nodes: int = 1) -> None:
    """Append a record of an execution to segments.jsonl, before its processes start.

    Written first so that an execution that is killed is recorded too. `processes` is the total over
    all `nodes`.
    """
    segment = {
        "started": round(time.time(), 3),
        "host": socket.gethostname(),
        "device": job.resources.device,
        "processes": processes,
        "nodes": nodes,
        "threads": job.resources.threads,
        "device_batch_size": job.resources.device_batch_size,
        "torch": importlib.metadata.version("torch"),
    }
    job.directory.mkdir(parents=True, exist_ok=True)
    with (job.directory / "segments.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(segment) + "\n")


def read_segments(job: Job) -> list[Facts]:
    """Return every execution of a finished job: host, start and end (Unix seconds), steps, dollars.

    The last one ended when it wrote its result, however long publishing waits for the store. The
    others were stopped or killed: their end is the time of their last event.
    """
    ended = (job.directory / "result.json").stat().st_mtime
    segments: list[Facts] = list(read_groups(job.directory / "segments.jsonl"))
    events = list(read_events(job.events))
    starts = [segment["started"] for segment in segments]
    for number, segment in enumerate(segments):
        is_last = number == len(segments) - 1
        until = ended if is_last else starts[number + 1]
        # Events carry no execution number: the time of the next start separates them.
        own = [event for event in events if starts[number] <= event["time"] < until]
        steps = [event["step"] for event in own if event["kind"] in ("start", "step")]
        segment["ended"] = ended if is_last else max([starts[number], *(e["time"] for e in own)])
        segment["first_step"] = steps[0] if steps else 0
        segment["last_step"] = steps[-1] if steps else 0
        hours = (segment["ended"] - segment["started"]) / 3600
        segment["dollars"] = round(hours * job.resources.dollars_per_hour, 4)
    return segments


def find_commit(root: Path) -> str | None:
    """Return the commit that is checked out, or None outside a repository."""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except OSError:  # no git here
        return None
    return done.stdout.strip() or None
