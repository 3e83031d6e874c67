"""How a job came about, execution by execution: recorded with an artifact, deciding nothing."""

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
    """Note that an execution starts, so that one which is killed still counts.

    `processes` are those of all `nodes` together.
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
    """Return every execution of a finished job: where, from when to when, from step to step.

    The last one ended when it wrote its result, however long publishing waits for the store. One
    that was killed is taken to have ended with its last event.
    """
    ended = (job.directory / "result.json").stat().st_mtime
    segments: list[Facts] = list(read_groups(job.directory / "segments.jsonl"))
    events = list(read_events(job.events))
    starts = [segment["started"] for segment in segments]
    for number, segment in enumerate(segments):
        is_last = number == len(segments) - 1
        until = ended if is_last else starts[number + 1]
        own = [event for event in events if starts[number] <= event["time"] < until]
        steps = [event["step"] for event in own if event["kind"] in ("start", "step")]
        segment["ended"] = ended if is_last else max([starts[number], *(e["time"] for e in own)])
        segment["first_step"] = steps[0] if steps else 0
        segment["last_step"] = steps[-1] if steps else 0
        hours = (segment["ended"] - segment["started"]) / 3600
        segment["dollars"] = round(hours * job.resources.dollars_per_hour, 4)
    return segments


def find_commit(root: Path) -> str | None:
    """The commit that is checked out, or None outside a repository."""
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
