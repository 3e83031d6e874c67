"""Run threads while a block runs, and join them at its end."""

import contextlib
import threading
from collections.abc import Callable, Generator
from typing import TypeAlias

Work: TypeAlias = Callable[[threading.Event], None]  # returns soon after the event is set


@contextlib.contextmanager
def run_in_background(*works: Work) -> Generator[None]:
    """Run each of `works` in its own thread; at the block's end set their event and join them."""
    over = threading.Event()
    # Daemons: a work that never returns must not keep the process alive after a second Ctrl-C.
    threads = [threading.Thread(target=work, args=(over,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


@contextlib.contextmanager
def poll(look: Callable[[], None], *, every: float) -> Generator[None]:
    """Call `look` every so many seconds while the block runs, and once more when it has ended."""
    watched = threading.Event()

    def watch(over: threading.Event) -> None:
        while not over.wait(every):
            look()
        watched.set()

    try:
        with run_in_background(watch):
            yield
    finally:
        # Not set if a second Ctrl-C interrupted the join: then a slow `look` is not awaited.
        if watched.is_set():
            look()
