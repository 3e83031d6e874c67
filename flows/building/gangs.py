"""Build a requested stage on a gang: machines that Slurm or Kubernetes starts together.

Each of them runs `nanochat stage REQUEST`, which builds as on any machine. The process here submits
the gang, follows it, and looks for the artifact. The gang's name follows from the request: a
process that is started again finds the gang of the one before. Requests that compete for machines
wait in the scheduler's queue.
"""

import json
import re
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import TypeVar

from flows.building.build import Built, find_usable, finish, reporting_failure, reuse
from flows.building.context import Watch
from flows.building.retry import PATIENCE, TransientStageError
from flows.building.stage_request import StageRequest, check_same, match_digest, open_request
from flows.identity.manifest import Manifest
from flows.identity.ref import short
from infra.gangs.base import GangError, Gangs, GangSpec, GangState, SchedulerUnavailable
from infra.polling import SLOW_SECONDS
from infra.retry import NoAnswer, RetryPolicy, until_answered
from nanochat_core.errors import StageError

CANCEL_PATIENCE = 20.0  # the same for a cancel: a worker kills a cancelled flow run's process
MISTAKES = (1, 2)  # exit codes of a command that ends with an error that a retry repeats
# Of the ranks, unless the request says another. A cancelled Slurm job has less: KillWait, 30 s by
# default.
GRACE_SECONDS = 90.0
# Of node 0, which repeats the others' errors; `srun --label` writes the node before each line.
_ERROR_PREFIX = re.compile(r"(?: *0: +)?(error|hint): (.*)")

T = TypeVar("T")


def build_on_gang(
    request: StageRequest, gangs: Gangs, *, watch: Watch, is_cancelled: Callable[[], bool]
) -> Built:
    """Build a request on a gang, or return its artifact if the store has it.

    An exception from outside (a signal) cancels the gang only if `is_cancelled`: otherwise it
    continues, and the next call finds it. Raises StageError with the gang's own message if it
    failed by a mistake or was cancelled, TransientStageError if it was lost or its scheduler does
    not answer for PATIENCE, GangError if the scheduler refuses it.
    """
    following = _Following(
        gangs, lambda text: watch(request.stage, {"kind": "message", "text": text})
    )
    try:
        return _build(request, following, watch)
    except BaseException:
        if is_cancelled():
            following.cancel(gang_name(request))
        raise


def _build(request: StageRequest, following: "_Following", watch: Watch) -> Built:
    stage, context, inputs = open_request(request, watch=watch)
    with reporting_failure(stage, context):
        check_same(request, stage, context, inputs)
        wait = context.wait_for_store(stage.name)
        began = time.time()

        def find() -> Manifest | None:
            return wait(lambda: find_usable(context, request.ref))

        if (found := find()) is not None:
            return reuse(context, found)
        gangs = following.gangs
        gang = following.gang = following.ask(lambda: _find_or_submit(gangs, request))
        following.log(gangs.describe(gang))
        state = following.wait_for_end(gang)
        if (manifest := find()) is None:
            raise _reason(gangs.describe(gang), state, following.last_error)
    return finish(context, manifest, began=began)


def gang_name(request: StageRequest) -> str:
    """Return the name of the request's gang, which is equal for requests that one gang serves."""
    stage = request.stage.replace("_", "-")  # the name is a label of DNS too
    digest = match_digest(request, pool=None)
    return f"{stage}-{short(request.fingerprint)}-{digest[:6]}"


def _find_or_submit(gangs: Gangs, request: StageRequest) -> str:
    name = gang_name(request)
    if (found := gangs.find(name)) is not None:
        return found
    if not any(setting.startswith("grace_seconds=") for setting in request.place):
        request = replace(request, place=(*request.place, f"grace_seconds={GRACE_SECONDS:.0f}"))
    return gangs.submit(
        GangSpec(
            name=name,
            nodes=request.nodes,
            gpus=request.gpus,
            words=("stage", json.dumps(asdict(request))),
            store=request.store,
        )
    )


def _reason(gang: str, state: GangState, last_error: dict[str, str]) -> StageError:
    """Return the error of a gang that ended without an artifact. `last_error` is its own."""
    if state.phase == "cancelled":
        return StageError(f"{gang} was cancelled: {state.text}", hint="press Retry to resume")
    if state.phase == "failed" and state.exit_code in MISTAKES:
        text = last_error.get("error") or f"{gang} failed: {state.text}"
        return StageError(text, hint=last_error.get("hint"))
    if state.phase == "finished":
        text, hint = "it ended well, without an artifact", "give its nodes the same store"
        return TransientStageError(f"{gang}: {text}", hint=hint)
    return TransientStageError(f"{gang} was lost: {state.text}")


class _Following:
    """A gang that is followed: its lines and states go to `log`."""

    def __init__(self, gangs: Gangs, log: Callable[[str], None]) -> None:
        self.log = log
        self.last_error: dict[str, str] = {}  # the last line "error: ...", and its hint
        self.gangs = gangs
        self.gang: str | None = None  # its id, once it is known
        self._after = ""  # where its new lines begin
        self._reported: dict[str, str] = {}  # the last text of each subject

    def wait_for_end(self, gang: str) -> GangState:
        """Return the state in which the gang has ended."""
        while True:
            state = self.ask(lambda: self.gangs.state(gang))
            self._report("state", f"{state.phase}: {state.text}")
            while self.forward_logs(gang):
                pass
            if state.phase not in ("queued", "running"):
                return state
            time.sleep(SLOW_SECONDS)

    def cancel(self, name: str) -> None:
        """Cancel the gang of this name, and one whose submission got no answer.

        If the scheduler refuses or does not answer, logs which gang still runs.
        """
        try:
            self.ask(lambda: self.gangs.cancel(name), CANCEL_PATIENCE)
        except StageError as error:
            gang = self.gang
            which = self.gangs.describe(gang) if gang else f"gang {name}, if it exists,"
            self.log(f"{which} still runs: {error}")

    def ask(self, request: Callable[[], T], patience: float = PATIENCE) -> T:
        """Return the scheduler's answer; repeat the request while there is none.

        Raises TransientStageError after `patience` seconds.
        """

        def report(failure: NoAnswer) -> None:
            self._report("answer", f"{failure.error}; retrying")
            if failure.seconds > patience:
                raise TransientStageError(
                    f"the scheduler does not answer: {failure.error}",
                    hint="the gang continues; start or check its scheduler",
                ) from failure.error

        policy = RetryPolicy(first_wait=SLOW_SECONDS, longest_wait=SLOW_SECONDS)
        return until_answered(request, SchedulerUnavailable, policy=policy, on_failure=report)

    def forward_logs(self, gang: str) -> bool:
        """Log the gang's new lines; return whether there were any."""
        try:
            lines, self._after = self.gangs.logs(gang, self._after)
        except GangError as error:  # of a node that is lost, perhaps; the state says so
            self._report("lines", f"its lines cannot be read: {error}")
            return False
        for line in lines:
            self.log(line)
            if (found := _ERROR_PREFIX.match(line)) is not None:
                previous = self.last_error if found[1] == "hint" else {}
                self.last_error = {**previous, found[1]: found[2]}
        return bool(lines)

    def _report(self, subject: str, text: str) -> None:
        """Log a text, unless it was the last one of its subject."""
        if self._reported.get(subject) != text:
            self._reported[subject] = text
            self.log(text)
