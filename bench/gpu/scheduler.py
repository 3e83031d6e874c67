"""Runs steps in order of their value: they prepare beside each other, and take the GPU in turn.

From the first second steps compile, the most valuable first, as many as the cores and the GPU's
memory allow. One at a time has the GPU: the most valuable that is ready and leaves enough time for
all that are worth more. While a `quiet` one has it, the others' preparation is stopped; it waits
for those that are worth more. Each step is killed at its hard end, and what it has said is kept.
"""

import time
from collections.abc import Sequence
from typing import Any

from bench.gpu.nvml import Gpu, Sampler
from bench.gpu.programs import Program
from bench.gpu.results import NEEDS_GPU, Entry, Results
from bench.gpu.schedule import Step, fitting

POLL = 0.05  # seconds


class Scheduler:
    """A schedule while it runs."""

    def __init__(
        self,
        entries: Sequence[Entry],
        results: Results,
        *,
        seconds: float,
        cores: int,
        gpu: Gpu | None,
        dry: bool,
    ) -> None:
        """`seconds` for all; `cores` for preparing; without a GPU memory is no limit."""
        self._entries, self._results = entries, results
        self._seconds, self._cores, self._dry = seconds, cores, dry
        self._gpu = gpu
        self._programs: dict[str, Program] = {}
        self._samplers: dict[str, Sampler] = {}

    def run(self) -> None:
        """Run what fits, until all is over or the time is."""
        for entry in self._entries:
            if (why := entry.step.missing()) is not None:
                self._end(entry, "skipped", why)
        last, why = time.monotonic(), "the scheduler failed"
        try:
            while any(not entry.is_over for entry in self._entries):
                now = time.monotonic()
                self._watch(now - last)
                last = now
                fits = self._fitting()
                self._leave_out(fits)
                self._prepare(fits)
                self._give_turn(fits)
                time.sleep(POLL)
        except KeyboardInterrupt:
            why = "stopped by a signal"
        finally:  # nothing is left unless this was ended early
            self._stop(why)
            self._results.write()

    def _watch(self, passed: float) -> None:
        """Notice what has ended, and end what has had its time; `passed` seconds since last."""
        for entry in self._entries:
            program = self._programs.get(entry.step.name)
            if program is None:
                continue
            if entry.status == "running":
                entry.seconds += passed
            elif entry.status == "preparing" and not program.is_held:
                entry.prepared += passed
            if entry.status == "preparing" and program.is_ready:
                self._set(entry, "ready")
            code, step = program.ended(), entry.step
            if code is not None:
                self._close(entry)  # reads what it has written
                needs = [row["name"] for row in entry.results if row.get("needs") == "a GPU"]
                if code:
                    self._end(entry, "failed", f"ended with {code}", errors=True)
                else:
                    self._end(entry, NEEDS_GPU if needs else "ok", *needs)
            elif entry.status == "running" and entry.seconds >= step.seconds:
                self._end(entry, "failed", f"took longer than {step.seconds} s", errors=True)
            elif entry.status == "preparing" and entry.prepared >= step.ready:
                self._end(entry, "failed", f"was not ready after {step.ready} s", errors=True)

    def _fitting(self) -> list[Step]:
        """Return the steps that can still end in time, the running one among them."""
        left = [
            (e.step, e.step.seconds - e.seconds)
            for e in sorted(self._entries, key=lambda e: e.status != "running")
            if not e.is_over
        ]
        running = {e.step.name for e in self._entries if e.status == "running"}
        found = fitting(left, self._seconds - self._results.elapsed)
        return [step for step, _ in left if step in found or step.name in running]

    def _leave_out(self, fits: list[Step]) -> None:
        """End the preparation of what does not fit now; skip it if no other may end early."""
        left = self._seconds - self._results.elapsed
        for entry in self._entries:
            if entry.is_over or entry.step in fits:
                continue
            if entry.status != "waiting":
                self._close(entry)
                self._set(entry, "waiting")
            if not fits:
                why = f"{max(0.0, left):.0f} s are left, it takes {entry.step.seconds}"
                self._end(entry, "skipped", why)

    def _prepare(self, fits: list[Step]) -> None:
        """Start preparing what fits beside what runs: in time, cores and memory."""
        alive = [e for e in self._entries if e.step.name in self._programs]
        cores = sum(1 if self._dry else e.step.cores for e in alive if e.status == "preparing")
        memory = sum(e.step.gigabytes for e in alive)
        if any(e.status == "running" and e.step.quiet for e in alive):
            return
        for entry in self._entries:
            step = entry.step
            if entry.status != "waiting" or step not in fits or not step.ready:
                continue
            takes = 1 if self._dry else step.cores
            if (cores and cores + takes > self._cores) or not self._has_room(memory, step):
                continue
            cores, memory = cores + takes, memory + step.gigabytes
            self._start(entry, "preparing")

    def _has_room(self, gigabytes: float, step: Step) -> bool:
        """Return whether a step's memory fits beside the `gigabytes` that others may take."""
        if self._gpu is None or not gigabytes:
            return True
        return gigabytes + step.gigabytes <= self._gpu.total_bytes / 1e9

    def _give_turn(self, fits: list[Step]) -> None:
        """Give the GPU to the most valuable step that may have it, unless one has it."""
        if any(entry.status == "running" for entry in self._entries):
            return
        for program in self._programs.values():
            if program.is_held:
                program.release()
        alive = [e for e in self._entries if e.step.name in self._programs]
        memory = sum(e.step.gigabytes for e in alive)
        better_compile = False
        for entry in self._entries:
            step = entry.step
            if step in fits and not (step.quiet and better_compile):
                can_begin = not step.ready and self._has_room(memory, step)
                if entry.status == "ready" or (entry.status == "waiting" and can_begin):
                    self._begin(entry)
                    return
            better_compile |= entry.status == "preparing"

    def _begin(self, entry: Entry) -> None:
        """Give a step the GPU."""
        if entry.step.quiet:
            for other in self._entries:
                if other.status == "preparing":
                    self._programs[other.step.name].hold()
        entry.began_at = self._results.elapsed
        if self._gpu is not None:
            self._samplers[entry.step.name] = Sampler(self._gpu)
        if entry.status == "ready":
            self._programs[entry.step.name].give_turn()
            self._set(entry, "running")
        else:
            self._start(entry, "running")

    def _start(self, entry: Entry, status: Any) -> None:
        """Start a step's program."""
        name, entry.prepared = entry.step.name, 0.0

        def keep(row: dict[str, Any]) -> None:
            entry.results.append(row)
            self._results.write()

        def show(line: str) -> None:
            entry.lines.append(line)
            self._results.announce(name, line)

        def error(line: str) -> None:
            self._results.log(name, line)
            if line.strip():
                entry.errors.append(line)

        self._set(entry, status)  # before the program can print
        self._programs[name] = Program(
            entry.step.argv(dry=self._dry),
            dry=self._dry,
            prepares=bool(entry.step.ready),
            on_result=keep,
            on_line=show,
            on_error=error,
        )

    def _stop(self, why: str) -> None:
        """End all programs."""
        for entry in self._entries:
            # By its status: a signal may come after a program was started and before it is known.
            if entry.status == "waiting":
                self._end(entry, "skipped", why)
            elif not entry.is_over:
                self._end(entry, "failed", why, errors=True)

    def _close(self, entry: Entry) -> None:
        if (program := self._programs.pop(entry.step.name, None)) is not None:
            program.close()
        if (sampler := self._samplers.pop(entry.step.name, None)) is not None:
            entry.clocks = sampler.close()

    def _end(self, entry: Entry, status: Any, *why: str, errors: bool = False) -> None:
        self._close(entry)
        entry.why = [*why, *(entry.errors if errors else ())]
        self._set(entry, status)

    def _set(self, entry: Entry, status: Any) -> None:
        entry.status = status
        self._results.announce(entry.step.name, ", ".join([status, *entry.why[:1]]))
        self._results.write()
