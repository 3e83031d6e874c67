"""Python's cyclic garbage collector, disabled during training steps.

A full collection visits every object, which takes some 100 ms once torch is loaded, and it delays
all ranks whichever of them it runs on. Inside `gc_disabled` only `collect` runs a collection.
"""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def gc_disabled() -> Iterator[None]:
    """Disable automatic collection, and exclude the objects that exist now from later ones."""
    was_enabled = gc.isenabled()
    # Collected first: freeze would make existing garbage permanent.
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
    """Run a collection, if automatic collection is disabled."""
    if not gc.isenabled():
        gc.collect()
