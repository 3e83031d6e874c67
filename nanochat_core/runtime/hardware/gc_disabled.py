"""Python's cyclic garbage collector, kept out of training steps.

A full collection looks at every object there is, some 100 ms after torch is loaded, and it falls on
one rank's step or another's. Inside `frozen` there is none but those asked for with `collect`.
"""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def frozen() -> Iterator[None]:
    """What lives at the beginning is not looked at again; nothing is collected by itself."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


def collect() -> None:
    """Collect what became garbage since, if collection is off."""
    if not gc.isenabled():
        gc.collect()
