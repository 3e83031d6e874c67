"""Text sources of installed packages: entry points of the group `GROUP`."""

from nanochat_core.config import ShardsConfig
from nanochat_core.data.hub.datasets import DATASETS
from nanochat_core.data.text.documents import TextSource
from nanochat_core.errors import ConfigError, NanochatError
from tasks import plugins
from tasks.base import TaskError

GROUP = "nanochat_flows.text"
BUILT_IN = ("pydocs", "local", "hub", "s3", *DATASETS)


def modules_of(name: str) -> list[str]:
    """Return the module of an installed text source; none for a built-in or unknown one."""
    found = [] if name in BUILT_IN else plugins.references(GROUP, name)
    return [reference.partition(":")[0] for reference in found]


def installed_source(name: str) -> TextSource:
    """Load an installed text source. Raises ConfigError if there is none, or if it is unusable."""
    found = plugins.references(GROUP, name)
    if not found:
        known = ", ".join([*BUILT_IN, *sorted(plugins.names(GROUP))])
        raise ConfigError(f"shards.source is '{name}'", hint=f"one of: {known}")
    try:
        return plugins.load_one(found, TextSource, f"text source '{name}'")
    except TaskError as error:
        raise ConfigError(str(error), hint="fix or uninstall the package that has it") from error


def current_snapshot(source: TextSource, config: ShardsConfig) -> tuple[str, ...]:
    """Return the snapshot of an installed source's text as it is now. Raises ConfigError."""
    if source.snapshot is None:
        return ()
    try:
        return tuple(source.snapshot(config))
    except NanochatError:
        raise
    except Exception as error:  # a package's own code may raise anything
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"text source '{config.source}' cannot read its text: {why}") from error
