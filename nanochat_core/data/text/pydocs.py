"""Text that needs no network: the documentation of Python and of the installed packages.

Sources are read, never imported: docstrings with their signatures, the help topics of `pydoc`, and
package descriptions. The snapshot is a list of exact versions: the same snapshot gives the same
documents everywhere.
"""

import csv
import gc
import platform
import re
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from nanochat_core.config import ShardsConfig
from nanochat_core.data.text.docstrings import (
    DocSection,
    clean,
    make_documents,
    read_sections,
    split_text,
)
from nanochat_core.data.text.documents import Document
from nanochat_core.errors import DataError
from nanochat_core.runtime.progress import Progress

PYTHON = "python"
# Distributions with much documentation, among this package's direct and indirect dependencies.
CANDIDATES = (
    *("alembic", "anyio", "attrs", "boto3", "click", "cyclopts", "docker", "duckdb", "fastapi"),
    *("filelock", "fsspec", "httpx", "huggingface-hub", "jinja2", "mpmath", "networkx", "numpy"),
    *("oauthlib", "packaging", "pendulum", "prefect", "prometheus-client", "psutil", "pyarrow"),
    *("pydantic", "python-dateutil", "redis", "requests", "rich", "s3transfer"),
    *("sortedcontainers", "sqlalchemy", "starlette", "sympy", "torch"),
    *("tqdm", "typing-extensions", "urllib3", "uvicorn", "websockets"),
)
# Tests, vendored packages, internals whose docstrings are notes, and parts of the standard library
# that some systems lack.
_SKIPPED_FOLDERS = frozenset(
    (
        *("test", "tests", "testing", "_vendor", "_vendored", "vendor", "_dynamo", "_inductor"),
        *("site-packages", "dist-packages", "idlelib", "tkinter", "turtledemo", "lib2to3"),
        *("ensurepip", "__pycache__"),
    )
)
_DIST_INFO = re.compile(r"(.+)-([^-]+)\.dist-info")
_NOT_PROSE = re.compile(r"^[ \t]*(\[?!\[|<|\|).*$", re.MULTILINE)  # badges, HTML, tables
_FILES_PER_TASK = 32


def installed_snapshot() -> tuple[str, ...]:
    """Return `name==version` of this Python and every installed candidate; fast, for a plan."""
    installed = _installed()
    found = [f"{name}=={installed[name][0]}" for name in CANDIDATES if name in installed]
    return (f"{PYTHON}=={platform.python_version()}", *found)


def documents(config: ShardsConfig, progress: Progress, scratch: Path) -> Iterator[Document]:
    """Yield the documentation of everything in `config.snapshot`, always in the same order.

    Raises DataError if the installed versions are not the snapshot's.
    """
    # Imported late: a plan needs `installed_snapshot` only, and should not wait for these.
    from nanochat_core.data.processes import map_in_processes, usable_cores

    folders = _check_snapshot(config.snapshot)
    names = [entry.partition("==")[0] for entry in config.snapshot]
    sources = [source for name in names for source in _sources(name, folders.get(name))]
    # Batches, as sending single files to a process would take longer than reading them.
    tasks = [sources[i : i + _FILES_PER_TASK] for i in range(0, len(sources), _FILES_PER_TASK)]
    seen: set[str] = set()
    progress.message(f"reading the documentation in {len(sources)} files of {len(names)} packages")
    progress.start(len(tasks), unit="batch of files")
    results_of_tasks = map_in_processes(_read_files, tasks, processes=usable_cores())
    for i, results in enumerate(results_of_tasks, start=1):
        for (_, module), sections in zip(tasks[i - 1], results, strict=True):
            for text in make_documents(sections, seen=seen):
                yield Document(text=text, group=module)
        progress.step(i)
    if PYTHON in names:
        yield from _help_topics()
    for name, folder in folders.items():
        yield from _description(name, folder)


def _installed() -> dict[str, tuple[str, Path]]:
    """Return normalised name -> (version without its local part, dist-info folder)."""
    found: dict[str, tuple[str, Path]] = {}
    for entry in sys.path:
        folder = Path(entry)
        for path in folder.glob("*.dist-info") if folder.is_dir() else ():
            match = _DIST_INFO.fullmatch(path.name)
            if match:
                name = re.sub(r"[-_.]+", "-", match[1]).lower()
                # The first on sys.path is the one that Python imports.
                found.setdefault(name, (match[2].partition("+")[0], path))
    return found


def _check_snapshot(snapshot: Sequence[str]) -> dict[str, Path]:
    """Return the dist-info folder of each package in the snapshot, all at the right versions."""
    if not snapshot:
        raise DataError(
            "the text source pydocs has an empty snapshot",
            hint="shards.snapshot lists name==version of the packages to read",
        )
    installed = _installed()
    folders: dict[str, Path] = {}
    for entry in snapshot:
        name, _, version = entry.partition("==")
        if name == PYTHON:
            actual = platform.python_version()
        elif name in installed:
            actual, folders[name] = installed[name]
        else:
            raise DataError(
                f"the text snapshot needs {entry}, which is not installed",
                hint=f"pip install {entry}",
            )
        if actual != version:
            raise DataError(
                f"the text snapshot needs {entry}, installed is {actual}",
                hint="plan again from this environment, or install that version",
            )
    return folders


def _sources(name: str, dist_info: Path | None) -> list[tuple[str, str]]:
    """Return (path, dotted module name) of each source file to read, sorted by path."""
    root = dist_info.parent if dist_info else Path(sysconfig.get_paths()["stdlib"])
    if dist_info is None:
        files = [path.relative_to(root) for path in root.rglob("*.py")]
    else:
        files = [Path(line) for line in _recorded(name, dist_info) if line.endswith(".py")]
    # RECORD may list files outside of the folder, such as scripts ("../../bin").
    kept = [f for f in files if not _SKIPPED_FOLDERS & set(f.parts[:-1]) and ".." not in f.parts]
    return [(str(root / f), _module_name(f)) for f in sorted(kept, key=lambda f: f.as_posix())]


def _recorded(name: str, dist_info: Path) -> list[str]:
    try:
        with (dist_info / "RECORD").open(encoding="utf-8", newline="") as file:
            return [line[0] for line in csv.reader(file) if line]
    except OSError as error:
        raise DataError(
            f"the installation of {name} has no list of its files: {error}",
            hint=f"install it again with pip: pip install --force-reinstall {name}",
        ) from error


def _module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def _read_files(sources: Sequence[tuple[str, str]]) -> list[list[DocSection]]:
    """Return the sections of each file; none for a file that is not UTF-8."""
    results: list[list[DocSection]] = []
    gc.disable()  # a syntax tree has no cycles, and searching for them takes a fifth of the time
    try:
        for path, module in sources:
            try:
                source = Path(path).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                source = ""
            results.append(read_sections(source, module))
    finally:
        gc.enable()
    return results


def _help_topics() -> Iterator[Document]:
    from pydoc_data.topics import topics  # half a megabyte of text

    for topic in sorted(topics):
        for text in split_text([clean(topics[topic])], title=f"help({topic!r})"):
            yield Document(text=text, group=f"help {topic}")


def _description(name: str, dist_info: Path) -> Iterator[Document]:
    """Yield a package's description: the body of METADATA, as on its index page."""
    metadata = (dist_info / "METADATA").read_text(encoding="utf-8", errors="replace")
    body = clean(_NOT_PROSE.sub("", metadata.partition("\n\n")[2]))
    for text in split_text([body], title=name) if body else ():
        yield Document(text=text, group=f"description {name}")
