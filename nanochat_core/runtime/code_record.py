"""Record the code that a process runs: each module as it is loaded, each file as it is opened.

A fingerprint is computed before a job starts, from the files at that time. The code that the job
really ran is stored in its directory, under `code/`: every version of every file of our packages,
named by its digest and its module or path.

Not recorded: files that C code opens itself, and processes not started by multiprocessing.
"""

import hashlib
import marshal
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import MAGIC_NUMBER, cache_from_source, source_hash
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

PACKAGES = ("flows", "infra", "nanochat_core", "tasks")

_CHECKED_HASH = b"\x03\0\0\0"  # PEP 552: bytecode that holds for a source of this hash


def record_code(directory: Path, plugins: Sequence[str] = ()) -> None:
    """Store the code of our packages that this process has loaded, and all it loads later.

    The same of the packages `plugins`, which are not ours.
    """
    directory.mkdir(exist_ok=True)
    packages = frozenset((*PACKAGES, *plugins))
    recorder = _Recorder(directory, packages)
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in packages and (path := getattr(module, "__file__", None)):
            recorder.add_package(name, getattr(module, "__path__", ()))
            recorder.store(name, recorder.read(path))
    sys.meta_path.insert(0, recorder)
    sys.addaudithook(recorder.hear)


def read_record(directory: Path) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of all that was loaded: "tasks.words", "tasks/generated/words.txt".

    A file that a crash truncated is skipped: its code never ran.
    """
    for path in sorted(directory.glob("*-*")):
        digest, _, name = path.name.partition("-")
        content = path.read_bytes()
        if hashlib.sha256(content).hexdigest() == digest:
            yield name.replace(":", "/"), content


class _Recorder(MetaPathFinder):
    """A finder that delegates to the others and loads modules from source that it has stored."""

    def __init__(self, directory: Path, packages: frozenset[str]) -> None:
        self._directory = directory
        self._packages = packages
        self._folders: tuple[str, ...] = ()  # of our packages, each with a separator at its end
        self._stored: set[str] = set()
        self._lock = threading.RLock()
        self._reading = threading.local()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the other finders' spec with a recording loader. Raises ImportError."""
        if fullname.partition(".")[0] not in self._packages:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is None or spec.loader is None:
            return spec
        if not isinstance(spec.loader, SourceFileLoader):
            raise ImportError(f"{fullname} has no source that could be recorded", name=fullname)
        spec.loader = _Loader(fullname, spec.loader.path, self)
        self.add_package(fullname, spec.submodule_search_locations or ())
        return spec

    def add_package(self, name: str, folders: Sequence[str]) -> None:
        """Record the files of a package from now on. A subpackage is covered by its parent."""
        if "." not in name:
            found = {f"{alias}{os.sep}" for f in folders for alias in (f, os.path.realpath(f))}
            self._folders = tuple(sorted({*self._folders, *found}))

    def hear(self, event: str, args: tuple[Any, ...]) -> None:
        """Audit hook: store a file of our packages, as it is now, before it is opened."""
        if event != "open" or getattr(self._reading, "is_on", False):
            return
        file, mode, flags = args
        if not isinstance(file, str | bytes | os.PathLike):
            return
        path = os.path.abspath(os.fsdecode(file))  # pyright: ignore[reportUnknownArgumentType]
        folder = next((folder for folder in self._folders if path.startswith(folder)), None)
        if folder is None or path.endswith(".pyc") or _is_written(mode, flags):
            return
        if os.path.isfile(path):
            self.store(_name_of(path, os.path.dirname(folder[:-1])), self.read(path))

    def read(self, path: str) -> bytes:
        """Return a file's content without recording this access."""
        # Opening it here raises the audit event again, which would recurse.
        self._reading.is_on = True
        try:
            return Path(path).read_bytes()
        finally:
            self._reading.is_on = False

    def store(self, name: str, content: bytes) -> None:
        """Add `content` to the record, if it is new there."""
        label = f"{hashlib.sha256(content).hexdigest()}-{name.replace('/', ':')}"
        with self._lock:
            if label not in self._stored:
                path = self._directory / label
                if not path.exists():
                    # Renamed when complete: other ranks record into the same directory.
                    temporary = self._directory / f".{os.getpid()}.tmp"
                    temporary.write_bytes(content)
                    temporary.replace(path)
                self._stored.add(label)


class _Loader(SourceFileLoader):
    """A loader that compiles a module from the recorded bytes."""

    def __init__(self, fullname: str, path: str, recorder: _Recorder) -> None:
        super().__init__(fullname, path)
        self._recorder = recorder

    def get_code(self, fullname: str) -> CodeType:
        """Return the code of the recorded source, from bytecode if it is of the same source."""
        source = self._recorder.read(self.path)
        self._recorder.store(fullname, source)
        # Python accepts bytecode whose source has the same time and size, which may be of another
        # content; only hash-based bytecode certainly belongs to the source that is recorded.
        cached = cache_from_source(self.path)
        head = MAGIC_NUMBER + _CHECKED_HASH + source_hash(source)
        with suppress(OSError, ValueError, EOFError, TypeError):
            bytecode = self._recorder.read(cached)
            if bytecode.startswith(head):
                code = marshal.loads(memoryview(bytecode)[len(head) :])
                if isinstance(code, CodeType) and code.co_filename == self.path:
                    return code
        code = self.source_to_code(source, self.path)
        if not sys.dont_write_bytecode:
            self.set_data(cached, head + marshal.dumps(code))
        return code


def _is_written(mode: str | None, flags: int) -> bool:
    if mode is not None:
        return any(letter in mode for letter in "wax+")
    return flags & (os.O_WRONLY | os.O_RDWR) != 0


def _name_of(path: str, root: str) -> str:
    """Return the dotted name of a module, else the path from the packages' parent."""
    name = os.path.relpath(path, root)
    if not name.endswith(".py"):
        return name.replace(os.sep, "/")
    return name.removesuffix(".py").replace(os.sep, ".").removesuffix(".__init__")
