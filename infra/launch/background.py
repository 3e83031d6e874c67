"""Threads that work while a block runs, and end with it."""

import contextlib
import threading
from collections.abc import Callable, Generator
from typing import TypeAlias

Work: TypeAlias = Callable[[threading.Event], None]  # returns soon after the event is set


@contextlib.contextmanager
def run_in_background(*works: Work) -> Generator[None]:
    """Run each of `works` in a thread of its own; at the block's end they are told and awaited."""
    over = threading.Event()
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
        if watched.is_set():  # else a second Ctrl-C does not wait for what is on its way
            look()
