"""Find and download one model of a repository on the Hugging Face Hub, at one commit.

    hf://OWNER/NAME                   the one model of the repository, of its branch main
    hf://OWNER/NAME/FOLDER            the model in a folder of it
    hf://OWNER/NAME[/FOLDER]@BRANCH   at a branch, a tag or a commit

Its form is that of `read_model`. Every file is verified by its digest.
"""

import glob
import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from nanochat_core.data.hub.client import download, find_commit, list_files
from nanochat_core.data.hub.transfers import Log
from nanochat_core.errors import ConfigError, ModelError

SCHEME = "hf://"
_ADDRESS = re.compile(
    r"hf://(?P<repository>[\w.-]+/[\w.-]+?)(/(?P<folder>[\w./-]+?))?/?(@(?P<revision>[\w./-]+))?"
)
_NANOCHAT = re.compile(r"model_(\d{1,9})\.pt")
# What `read_model` reads of each form of ours.
_WANTED = {
    "hf": ("config.json", "model.safetensors", "tokenizer.json"),
    "safetensors": ("config.json", "model.safetensors", "tokenizer/*"),
}
_MAX_SHOWN = 4


@dataclass(frozen=True, kw_only=True)
class HubModel:
    """A model at one commit."""

    repository: str  # OWNER/NAME
    folder: str  # "" for the repository's own
    commit: str  # 40 hex digits

    @property
    def address(self) -> str:
        """The address that always means these bytes."""
        return f"{SCHEME}{self.repository}{f'/{self.folder}' * bool(self.folder)}@{self.commit}"


def is_on_hub(name: str) -> bool:
    """Return whether a model is named by its address on the Hub."""
    return name.startswith(SCHEME)


def pin_model(address: str) -> HubModel:
    """Return the model that an address means today.

    Raises ConfigError for an address of another form, DataError if there is no such repository or
    revision, or if the Hub is not reached and the revision's commit is not known.
    """
    found = _ADDRESS.fullmatch(address)
    if found is None:
        raise ConfigError(
            f"{address} is not the address of a model",
            hint="hf://OWNER/NAME, perhaps with /FOLDER, and with @ and a branch, tag or commit",
        )
    repository = found["repository"]
    commit = find_commit(repository, found["revision"] or "main", kind="model")
    return HubModel(repository=repository, folder=found["folder"] or "", commit=commit)


def download_model(
    model: HubModel, *, step: int | None = None, is_foreign: bool = False, log: Log
) -> Path:
    """Download a model's files and return their directory. Do not write to it.

    `step` chooses among nanochat's checkpoints, the last one by default. Of a model that only
    transformers can run the weights are downloaded with `is_foreign` alone: else it is a
    ModelError. So are a repository without a model, and one with several and no folder given.
    """
    from nanochat_core.interop.read_model import FOREIGN_FILES, foreign, form_of

    files = list_files(model.repository, model.commit, ["*"], kind="model")[1]
    folder = _choose_folder(model, [PurePosixPath(file.path) for file in files])
    names = {PurePosixPath(file.path).name for file in files if _is_in(file.path, folder)}

    def get(*patterns: str) -> Path:
        wanted = [f for f in files if any(_matches(f.path, folder, p) for p in patterns)]
        paths = download(model.repository, model.commit, wanted, log=log, kind="model")
        first = PurePosixPath(wanted[0].path)
        return paths[0].parents[len(first.parts) - 1] / folder  # the root, then the folder

    if steps := {int(m[1]): m[1] for name in names if (m := _NANOCHAT.fullmatch(name))}:
        digits = steps.get(max(steps) if step is None else step)
        if digits is None:
            known = ", ".join(map(str, sorted(steps)))
            raise ModelError(f"{model.address} has no step {step}", hint=f"it has: {known}")
        own = (f"model_{digits}.pt", f"meta_{digits}.json", "README.md")
        return get(
            *own, "tokenizer.pkl", "tokenizer/tokenizer.pkl", "../../tokenizer/tokenizer.pkl"
        )
    # The config first: whether it is nanochat's must not cost gigabytes.
    directory = get("config.json")
    form = form_of(directory)
    if form == "other" and not is_foreign:
        raise foreign(directory, name=model.address)
    wanted = FOREIGN_FILES if form == "other" else _WANTED[form]
    return get(*wanted, "README.md")


def _choose_folder(model: HubModel, paths: Iterable[PurePosixPath]) -> str:
    """Return the folder of the model, "" for the root. Raises ModelError unless there is one."""
    by_folder: dict[str, set[str]] = {}
    for path in paths:
        folder = "" if len(path.parts) == 1 else str(path.parent)
        by_folder.setdefault(folder, set()).add(path.name)
    found = sorted(
        folder
        for folder, names in by_folder.items()
        if any(map(_NANOCHAT.fullmatch, names))
        or ("config.json" in names and any(name.endswith(".safetensors") for name in names))
    )
    if model.folder in found:
        return model.folder
    where = f"{model.repository} at commit {model.commit[:12]}"
    if not found:
        raise ModelError(
            f"{where} has no model that can be read",
            hint="nanochat's model_*.pt, or config.json with *.safetensors",
        )
    if model.folder or len(found) > 1:
        shown = ", ".join(f"{SCHEME}{model.repository}/{f}" for f in found[:_MAX_SHOWN])
        what = f"no model in {model.folder}" if model.folder else f"{len(found)} models"
        raise ModelError(f"{where} has {what}", hint=f"name one: {shown.removesuffix('/')}")
    return found[0]


def _is_in(path: str, folder: str) -> bool:
    return str(PurePosixPath(path).parent) == (folder or ".")


def _matches(path: str, folder: str, pattern: str) -> bool:
    """Return whether a pattern below the folder matches; `*` matches no '/'."""
    parts = [part for part in folder.split("/") if part]
    while pattern.startswith("../"):
        if not parts:
            return False
        parts.pop()
        pattern = pattern.removeprefix("../")
    whole = PurePosixPath(*map(glob.escape, parts), pattern)
    return len(whole.parts) == len(PurePosixPath(path).parts) and fnmatchcase(path, str(whole))
