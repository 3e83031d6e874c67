"""Text that needs no network: the documentation of Python itself.

Reads docstrings with their signatures from the sources of the standard library, without importing
them, and the help topics of `pydoc`. The same version of Python gives the same documents, unless a
distribution leaves parts of it out.
"""

import gc
import platform
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

# Tests, installed packages, and parts of the standard library that some systems lack.
_SKIPPED_FOLDERS = frozenset(
    (
        *("test", "tests", "site-packages", "dist-packages", "idlelib", "tkinter", "turtledemo"),
        *("lib2to3", "ensurepip", "__pycache__"),
    )
)
_FILES_PER_TASK = 32


def python_snapshot() -> tuple[str, ...]:
    """Return the version of this Python, as a text snapshot; fast, for a plan."""
    return (f"python=={platform.python_version()}",)


def documents(config: ShardsConfig, progress: Progress, scratch: Path) -> Iterator[Document]:
    """Yield Python's documentation, always in the same order.

    Raises DataError if this is not the version of `config.snapshot`.
    """
    # Imported late: a plan needs `python_snapshot` only, and should not wait for these.
    from nanochat_core.data.processes import map_in_processes, usable_cores

    if config.snapshot != python_snapshot():
        raise DataError(
            f"the text is the documentation of {', '.join(config.snapshot) or 'no version'}, "
            f"this is {python_snapshot()[0]}",
            hint="plan again with this Python, or use that version",
        )
    sources = _sources(Path(sysconfig.get_paths()["stdlib"]))
    # Batches, as sending single files to a process would take longer than reading them.
    tasks = [sources[i : i + _FILES_PER_TASK] for i in range(0, len(sources), _FILES_PER_TASK)]
    seen: set[str] = set()
    progress.message(f"reading the documentation in {len(sources)} files of Python")
    progress.start(len(tasks), unit="batch of files")
    results_of_tasks = map_in_processes(_read_files, tasks, processes=usable_cores())
    for i, results in enumerate(results_of_tasks, start=1):
        for (_, module), sections in zip(tasks[i - 1], results, strict=True):
            for text in make_documents(sections, seen=seen):
                yield Document(text=text, group=module)
        progress.step(i)
    yield from _help_topics()


def _sources(root: Path) -> list[tuple[str, str]]:
    """Return (path, dotted module name) of each source file to read, sorted by path."""
    files = [path.relative_to(root) for path in root.rglob("*.py")]
    kept = [file for file in files if not _SKIPPED_FOLDERS & set(file.parts[:-1])]
    return [(str(root / f), _module_name(f)) for f in sorted(kept, key=lambda f: f.as_posix())]


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
