"""Compute an artifact's fingerprint: a digest of stage, configuration, inputs' contents and code.

Code is the static import closure of the stage's entry module inside this repository. A module is
hashed by its syntax tree, without comments, docstrings, layout or line numbers, so only a change of
meaning is a change. A data file is hashed if a module of the closure names it by a string literal
and it lies in that module's directory or below ("identity.jsonl" next to
tasks/generated/identity.py): by its bytes.

Not hashed: `CARRIERS`. Imports inside functions are, and those for type checkers alone. A module
that reads docstrings is refused. Imports by computed names are not seen, so stages must not use
them. The one exception is the modules of the tasks and text sources that a stage's configuration
names (`named_modules`), which are entries like its own. One of another package counts with all it
imports from that package and this repository.
"""

import contextlib
import hashlib
import importlib.util
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

from flows.identity import syntax
from flows.identity.ref import ArtifactRef
from flows.identity.syntax import Module, scan
from flows.stages import Stage
from nanochat_core.config import RunConfig
from nanochat_core.data.text.installed import modules_of as source_modules
from nanochat_core.errors import ConfigError
from nanochat_core.job import write_json
from nanochat_core.section import Section, Tree
from tasks.names import modules_of

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGES = ("flows", "infra", "nanochat_core", "tasks")

# Modules left out of the closure: they affect a result only through values that are hashed
# elsewhere. A wrong entry here hides a change; a missing one only rebuilds without need.
CARRIERS = frozenset(
    {
        "nanochat_core.config",
        "nanochat_core.eras",
        "nanochat_core.errors",
        "nanochat_core.job",
        "nanochat_core.runtime.code_record",
        "nanochat_core.runtime.hardware.gc_disabled",
        "nanochat_core.runtime.heartbeat",
        "nanochat_core.runtime.interrupt",
        "nanochat_core.runtime.metrics",
        "nanochat_core.runtime.hardware.gpu_specs",
        "nanochat_core.runtime.process_start",
        "nanochat_core.runtime.progress",
        "nanochat_core.runtime.trackers",
        "nanochat_core.runtime.versions",
        # Its choices, and those of `eras` behind it, are configuration; its counts are only shown.
        "nanochat_core.scaling",
        "nanochat_core.section",
        "nanochat_core.train.loop.checkpoint",
        "nanochat_core.train.loop.checkpointer",
        "nanochat_core.train.loop.metrics",
        "nanochat_core.train.loop.run_environment",
        "nanochat_core.worker",
        # It maps names to modules. The modules are hashed for each stage that loads them.
        "tasks.names",
    }
)


@dataclass(frozen=True, kw_only=True)
class Identity:
    """A fingerprint and all that it was computed from, which is stored to explain differences."""

    stage: str
    fingerprint: str  # 64 hex digits
    preimage: dict[str, Tree]

    @property
    def ref(self) -> ArtifactRef:
        """Return the artifact that has this identity."""
        return ArtifactRef(self.stage, self.fingerprint)

    @property
    def redo(self) -> int:
        """Return how often the artifact of this recipe had been asked for again."""
        return cast("int", self.preimage.get("redo", 0))

    def redone(self, number: int) -> "Identity":
        """Return the identity of the same recipe with another `redo`; with 0 it is the recipe's."""
        preimage = {name: part for name, part in self.preimage.items() if name != "redo"}
        preimage |= {"redo": number} if number else {}
        return replace(self, fingerprint=fingerprint_of(preimage), preimage=preimage)


def identify(
    stage: Stage,
    run: RunConfig,
    inputs: Mapping[str, str],
    *,
    code: "Code",
    records: Mapping[str, str] | None = None,
) -> Identity:
    """Return the identity of `stage` in `run`, given the content digest of each of its inputs.

    `records` has the digest of each input's manifest and logs, for a stage that reads them. `code`
    is the code that would run.
    """
    assert set(inputs) == {source.name for source in stage.inputs}, (stage.name, sorted(inputs))
    preimage = preimage_of(stage, run, code=code)
    preimage["inputs"] = dict(inputs)
    if stage.reads_records:
        assert records is not None, stage.name
        assert set(records) == set(inputs), (stage.name, sorted(records))
        preimage["records"] = dict(records)
    return Identity(stage=stage.name, fingerprint=fingerprint_of(preimage), preimage=preimage)


def preimage_of(stage: Stage, run: RunConfig, *, code: "Code") -> dict[str, Tree]:
    """Return the part of the pre-image that does not depend on the inputs."""
    config = canonical_config(stage, run)
    return {
        "stage": stage.name,
        "format": stage.format,
        "config": dict(config),
        "inputs": {},
        "code": dict(code_of(stage, config, code=code)),
    }


def code_of(stage: Stage, config: Mapping[str, Tree], *, code: "Code") -> dict[str, str]:
    """Return the digests of all code that decides `stage` with `config`, its canonical sections."""
    return code.closure(stage.entry, *named_modules(stage, config))


def named_modules(stage: Stage, config: Mapping[str, Tree]) -> list[str]:
    """Return the modules of tasks and text sources that `config` names and `stage` so imports."""
    sources = _names_in(config, stage.text) if stage.text else []
    tasks = _names_in(config, stage.tasks) if stage.tasks else []
    return [
        *(module for name in sources for module in source_modules(name)),
        *(module for name in tasks for module in modules_of(name, grades=stage.grades)),
    ]


def _names_in(config: Mapping[str, Tree], place: str) -> list[str]:
    """Return the name, or the names of all entries, in `section.field`."""
    section, field = place.split(".")
    value: Any = cast("dict[str, Any]", config[section])[field]
    return [value] if isinstance(value, str) else [entry["name"] for entry in value]


def plugins_of(stage: Stage, run: RunConfig) -> tuple[str, ...]:
    """Return the top-level packages, other than ours, whose code a stage runs."""
    modules = named_modules(stage, canonical_config(stage, run))
    return tuple(sorted({_top(name) for name in modules} - set(PACKAGES)))


def fingerprint_of(preimage: Mapping[str, Tree]) -> str:
    """Return the sha256 of a pre-image's canonical JSON, 64 hex digits."""
    return hashlib.sha256(canonical_json(preimage)).hexdigest()


def canonical_config(stage: Stage, run: RunConfig) -> dict[str, Tree]:
    """Return the sections of `run` that `stage` declares, in their canonical form."""
    sections = {name: getattr(run, name) for name in stage.config}
    return {n: s.canonical() if isinstance(s, Section) else s for n, s in sections.items()}


def single_settings(tree: Mapping[str, Tree], prefix: str = "") -> Iterator[tuple[str, Tree]]:
    """Yield every setting of a tree that is no group of settings: dotted name and value."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from single_settings(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def canonical_json(tree: object) -> bytes:
    """Return the one byte string for a value: sorted keys, no spaces, 1 and 1.0 differ.

    Raises TypeError for a type without a stable form, ValueError for NaN or infinity.
    """
    _check_types(tree)
    return json.dumps(tree, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _check_types(tree: object) -> None:
    # json.dumps turns tuples into lists and other keys into strings: two values, one byte string.
    if type(tree) is dict:
        for name, value in cast("dict[Any, Any]", tree).items():
            if type(name) is not str:
                raise TypeError(f"{name!r} is not a name in canonical JSON")
            _check_types(value)
    elif type(tree) is list:
        for item in cast("list[Any]", tree):
            _check_types(item)
    elif tree is not None and type(tree) not in (str, int, float, bool):
        raise TypeError(f"{type(tree).__name__} has no canonical form: {tree!r}")


class Code:
    """The packages under `root` as they are now. Each file is read once: make one for each plan.

    `cache` is a file with the results of earlier scans. It is keyed by content, so it is never
    stale, and may be deleted at any time.
    """

    def __init__(self, root: Path, *, cache: Path | None = None) -> None:
        self._root = root
        self._cache = cache
        self._known = _read_scans(cache) if cache else {}
        self._used: dict[str, Module] = {}
        self._paths: dict[str, Path | None] = {}
        self._digests: dict[str, dict[str, str]] = {}  # of a module and the data files it names
        self._imports: dict[str, list[str]] = {}

    def closure(self, entry: str, *more: str) -> dict[str, str]:
        """Return the digest per module and data file that the entries reach, in order of name."""
        # `more` are entries too, where they exist.
        assert self._find(entry), f"no module {entry} in {self._root}"
        digests: dict[str, str] = {}
        # Carriers count as seen: they are not hashed, nor is what only they import.
        seen, waiting = set(CARRIERS), list(self._modules([entry]))
        for name in more:
            if _top(name) not in PACKAGES and self._find(name) is None:
                raise ConfigError(
                    f"there is no source file of the module {name}, whose code is to be hashed",
                    hint="install the package that has it as Python source",
                )
            waiting += self._modules([name], own=_top(name))
        while waiting:
            name = waiting.pop()
            if name not in seen:
                seen.add(name)
                self._read(name)
                digests |= self._digests[name]
                waiting += self._imports[name]
        return dict(sorted(digests.items()))

    def save_cache(self) -> None:
        """Write the cache. No-op if nothing changed or the disk refuses."""
        if self._cache and self._used != self._known:
            # Only what this plan used: scans of deleted code must not pile up.
            tree = {"scanner": _scanner(), "modules": {k: asdict(m) for k, m in self._used.items()}}
            with contextlib.suppress(OSError):
                self._cache.parent.mkdir(parents=True, exist_ok=True)
                write_json(self._cache, tree)

    def _read(self, name: str) -> None:
        if name in self._digests or (path := self._find(name)) is None:
            return
        # Relative imports start from the package: a package's own name for its __init__.py.
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        module = self._scan(path.read_bytes(), path.suffix, package)
        if module.reads_docstrings:
            raise ConfigError(
                f"{name} reads __doc__, and docstrings are in no fingerprint: a changed one would "
                "change results unseen",
                hint="put the text into a constant",
            )
        self._digests[name] = {name: module.digest}
        for file in (path.parent / file_name for file_name in module.file_names):
            if file.is_file():
                # The root is above as many folders as the module has packages.
                levels = name.count(".") + (path.name == "__init__.py")
                data = file.relative_to(path.parents[levels]).as_posix()
                scanned = self._scan(file.read_bytes(), file.suffix, package)
                self._digests[name][data] = scanned.digest
        self._imports[name] = list(dict.fromkeys(self._modules(module.imports, own=_top(name))))

    def digest_of(self, name: str, source: bytes) -> str:
        """Return the digest of `source` as the module or data file `name` of a closure."""
        suffix = Path(name).suffix if "/" in name else ".py"
        return self._scan(source, suffix, name.rpartition(".")[0]).digest

    def _scan(self, source: bytes, suffix: str, package: str) -> Module:
        digest = hashlib.sha256(source).hexdigest()
        if suffix != ".py":
            return Module(digest=digest)
        # The same source has other imports in another package, so the package is part of the key.
        key = f"{package} {digest}"
        module = self._used.get(key) or self._known.get(key) or scan(source, package=package)
        self._used[key] = module
        return module

    def _modules(self, imports: Iterable[str], own: str | None = None) -> Iterator[str]:
        """Yield every module that these imports load: parent packages, and the module itself.

        Only of our packages, and of the top-level package `own` of a task outside them.
        """
        for name in imports:
            if (top := _top(name)) in PACKAGES or top == own:
                yield from self._found(name)

    def _found(self, name: str) -> list[str]:
        """Return the modules among `name` and the packages above it."""
        # `from a.b import c` gives a.b.c. Whether c is a module or a name shows in the files.
        above = self._found(name.rpartition(".")[0]) if "." in name else []
        return [*above, name] if self._find(name) else above

    def _find(self, name: str) -> Path | None:
        if name not in self._paths:
            package = name.rpartition(".")[0]
            parent = self._find(package) if package else None
            is_name = parent is not None and parent.name != "__init__.py"  # not in a package
            roots = () if is_name else self._roots_of(name)
            stems = [f"{root}/{name.replace('.', '/')}" for root in roots]
            files = [file for stem in stems for file in (f"{stem}.py", f"{stem}/__init__.py")]
            self._paths[name] = next((Path(f) for f in files if os.path.isfile(f)), None)
        return self._paths[name]

    def _roots_of(self, name: str) -> list[Path]:
        """Return the directories that may hold the top-level package of a module."""
        top = _top(name)
        if top in PACKAGES:
            return [self._root]
        spec = importlib.util.find_spec(top)  # found, not imported
        if spec is None:
            return []
        # A package without __init__.py may have several folders.
        if spec.submodule_search_locations is not None:
            return [Path(folder).parent for folder in spec.submodule_search_locations]
        return [Path(spec.origin).parent] if spec.origin else []


def _top(name: str) -> str:
    return name.partition(".")[0]


def _scanner() -> str:
    """Return a digest of the scanner's own source, which makes the cache of another one stale."""
    files = (Path(__file__), Path(syntax.__file__))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _read_scans(cache: Path) -> dict[str, Module]:
    try:
        tree = json.loads(cache.read_bytes())
        if tree["scanner"] != _scanner():
            return {}
        return {
            key: Module(
                digest=module["digest"],
                imports=tuple(module["imports"]),
                file_names=tuple(module["file_names"]),
                reads_docstrings=module["reads_docstrings"],
            )
            for key, module in tree["modules"].items()
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}
