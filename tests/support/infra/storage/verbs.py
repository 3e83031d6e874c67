"""Every verb of a store as a function of the store, a key, and a file of at most 16 bytes."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

Use: TypeAlias = Callable[[Any, str, Path], object]

READS: Mapping[str, Use] = {
    "get": lambda store, key, path: store.get(key),
    "get of a size": lambda store, key, path: store.get(key, size=16),
    "get_stored": lambda store, key, path: store.get_stored(key),
    "head": lambda store, key, path: store.head(key),
    "fetch": lambda store, key, path: store.fetch(key, path.with_name("target"), size=16),
}
CONDITIONAL: Mapping[str, Use] = {
    "put_if_absent": lambda store, key, path: store.put_if_absent(key, b"mine"),
    "put_if_same": lambda store, key, path: store.put_if_same(key, b"mine", version="v"),
}
WRITES: Mapping[str, Use] = {
    "put": lambda store, key, path: store.put(key, b"mine"),
    "upload": lambda store, key, path: store.upload(key, path),
    **CONDITIONAL,
}
DELETE: Mapping[str, Use] = {"delete": lambda store, key, path: store.delete(key)}
OF_KEYS: Mapping[str, Use] = {**READS, **WRITES, **DELETE}
OF_STORES: Mapping[str, Use] = {
    "list": lambda store, key, path: list(store.list(key)),
    "abort": lambda store, key, path: store.abort_stale_uploads(before=1e12),
}
VERBS: Mapping[str, Use] = {**OF_KEYS, **OF_STORES}
