"""Use the runs, scores, files and models of a store from Python, by the names that commands take.

    from nanochat_flows.client import open_client

    client = open_client()                           # or open_client(store="s3://bucket/prefix")
    client.run("tiny").status                        # "finished"
    client.scores("tiny")                            # every metric with its 95 % interval
    client.curve("pretrain@tiny")                    # a row for each step
    client.fetch("rl@tiny", "my-model")              # its files, verified
    client.chat("tiny").ask("What is 2 + 3?")

Tables are `pyarrow.Table`: where pandas is installed, `to_pandas()` gives a DataFrame.
"""

import logging
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from duckdb import DuckDBPyRelation

import nanochat_flows.guard  # noqa: F401 - before other packages of ours

# isort: split

from flows.artifacts.cache import Cache
from flows.artifacts.download import choose_files, copy_files
from flows.artifacts.names import (
    is_artifact,
    open_artifact,
    open_model,
    open_run,
    open_usable,
)
from flows.artifacts.runs import Run, latest_runs
from flows.artifacts.transfer import read_file, watch_nothing
from flows.cli.options import StoreOptions, device_of
from flows.cli.use.chat_session import ChatSession, Sampling
from flows.compare.query import query_store
from flows.compare.tables import METRICS
from flows.identity.manifest import Manifest
from flows.interop.import_model import name_in_store
from infra.storage.base import Store
from nanochat_core.errors import ArtifactError

_LOG = logging.getLogger(__name__)


class Client:
    """A store and the cache of what was fetched from it. Made by `open_client`.

    Methods raise NanochatError, whose `hint` says what to do: ConfigError for a wrong name,
    ArtifactError for an artifact that is missing or damaged, StoreError for a store that fails.
    """

    def __init__(self, store: Store, cache: Cache) -> None:
        self.store = store
        self.cache = cache

    def runs(self, count: int = 20) -> list[Run]:
        """Return the latest runs, newest first."""
        damaged: list[str] = []
        found = list(latest_runs(self.store, count, unread=damaged))
        _warn(damaged)
        return found

    def run(self, name: str) -> Run:
        """Return the newest finished run of this name, that of a tag, or the one with this id."""
        return open_run(self.store, name)

    def artifact(self, name: str) -> Manifest:
        """Return the manifest of an artifact: its files, inputs, settings and metrics."""
        return open_artifact(self.store, name)

    def scores(self, name: str) -> pa.Table:
        """Return what the artifacts of a run measured, or one artifact alone.

        Columns: stage, metric, value, and low and high, a 95 % interval.
        """
        if is_artifact(name):
            chosen = f"evals where {_of_artifact(self.artifact(name))}"
        else:
            run = self.run(name).run
            chosen = f"stages join evals using (stage, fingerprint) where run = '{run}'"
        return self.sql(
            f"select stage, metric, value, low, high from {chosen} order by stage, metric"
        )

    def curve(self, name: str) -> pa.Table:
        """Return a row for each step of an artifact's training, a column for each metric.

        Raises ArtifactError if the artifact has no steps.
        """
        manifest = self.artifact(name)
        if (data := read_file(self.store, manifest, METRICS)) is None:
            raise ArtifactError(
                f"{manifest.name} has no steps", hint="stages that train have: pretrain, sft"
            )
        return pq.read_table(pa.BufferReader(data)).sort_by("step")

    def sql(self, query: str) -> pa.Table:
        """Return the answer to one select over the views that `nanochat sql` lists."""
        table, skipped = query_store(self.store, query, DuckDBPyRelation.to_arrow_table)
        _warn(skipped)
        return table

    def fetch(self, name: str, directory: str | Path, path: str | None = None) -> Path:
        """Copy an artifact's files, or those at `path`, to a directory; return the directory.

        Every byte is verified. A file that is there is left, and must be the same.
        """
        manifest = open_usable(self.store, name, warn=_LOG.warning)
        target = Path(directory).expanduser()
        files = choose_files(manifest, path)
        copy_files(self.store, manifest, files, target)
        return target

    def chat(
        self,
        model: str,
        *,
        temperature: float = 0.6,
        top_k: int = 50,
        max_tokens: int = 256,
        seed: int = 42,
    ) -> ChatSession:
        """Return a conversation with a model; `ask` returns an answer, `answer` its pieces.

        A GPU is used if there is one.
        """
        sampling = Sampling(temperature=temperature, top_k=top_k, max_tokens=max_tokens, seed=seed)
        device = device_of(None)
        name = name_in_store(
            self.store,
            model,
            home=self.cache.directory.parent,
            log=_LOG.info,
            watch=watch_nothing,
        )
        directory = open_model(self.store, name, cache=self.cache, warn=_LOG.warning)
        return ChatSession.open(directory, sampling=sampling, device=device)


def open_client(*, store: str | None = None, home: str | Path | None = None) -> Client:
    """Open a store by its URL.

    By default NANOCHAT_STORE, else the store in `home`: NANOCHAT_HOME, else ~/.nanochat-flows.
    Raises ConfigError or StoreError.
    """
    place = StoreOptions(store=store, home=None if home is None else Path(home))
    return Client(place.open_store(), place.cache)


def _of_artifact(manifest: Manifest) -> str:
    return f"stage = '{manifest.stage}' and fingerprint = '{manifest.fingerprint}'"


def _warn(skipped: list[str]) -> None:
    for problem in skipped:
        _LOG.warning("skipped: %s", problem)
