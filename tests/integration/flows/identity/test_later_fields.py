"""Fields of the configuration that were added later: a changed default is another fingerprint.

Each default is edited in the source of the configuration, one at a time, as a developer would do.
"""

import ast
import dataclasses
import hashlib
import json
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flows.identity.fingerprint import Code, fingerprint_of, preimage_of
from flows.profiles import open_profile
from flows.stages import STAGES
from nanochat_core import config
from nanochat_core.section import NEUTRAL, Section, neutral_key, types_of

SOURCE = Path(config.__file__).read_text()
RUN = open_profile("d12").run
# Where a type does not say what another value may be.
OTHER = {
    "NumericsConfig.fp8_scales": "bound",
    "NumericsConfig.fp8_sums": "fast",
    "OptimizerConfig.muon": "newton_schulz",
    "RLConfig.baseline": "leave_one_out",
    "RLConfig.rollout_precision": "int8",
    "RLConfig.clip": 0.2,
    "TokenizerConfig.pattern": "multilingual",
}
# What another value needs.
NEEDS: dict[str, dict[str, Any]] = {
    "OptimizerConfig.muon": {"muon_weight_decay": 0.0},
    "RLConfig.updates_per_batch": {"clip": 0.5},
}


def sections() -> list[type[Any]]:
    """Every group of settings, but the run itself: no stage declares it, only parts of it."""
    kinds = [k for k in vars(config).values() if isinstance(k, type) and issubclass(k, Section)]
    return [kind for kind in kinds if kind not in (Section, config.RunConfig)]


def later_fields() -> list[str]:
    """The fields that have a default, as the source declares them."""
    missing = dataclasses.MISSING
    return [
        neutral_key(kind, field.name)
        for kind in sections()
        for field in dataclasses.fields(kind)
        if (field.default, field.default_factory) != (missing, missing)
    ]


def another(key: str) -> Any:
    """A value that is not the default of the field."""
    if key in OTHER:
        return OTHER[key]
    kind, name = key.split(".")
    default = getattr(getattr(config, kind), name)
    hint = types_of(getattr(config, kind))[name]
    if default is None:
        return {str: "other", int: 3, float: 0.5}[hint.__args__[0]]
    return not default if hint is bool else default + (1 if hint is int else 0.03)


def with_default(key: str, value: Any) -> str:
    """The source of the configuration in which one field has another default."""
    kind, name = key.split(".")
    section = next(
        node
        for node in ast.parse(SOURCE).body
        if isinstance(node, ast.ClassDef) and node.name == kind
    )
    declared = next(
        node.value
        for node in section.body
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name
    )
    if isinstance(declared, ast.Call):
        declared = next(word.value for word in declared.keywords if word.arg == "default")
    lines = SOURCE.splitlines()
    line = lines[declared.lineno - 1]
    end = declared.end_col_offset
    lines[declared.lineno - 1] = f"{line[: declared.col_offset]}{value!r}{line[end:]}"
    return "\n".join(lines) + "\n"


@pytest.fixture
def edited(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Return the configuration's module as an edited source makes it."""

    def load(source: str) -> Any:
        module = types.ModuleType("edited_config")
        monkeypatch.setitem(sys.modules, "edited_config", module)
        exec(compile(source, "edited_config.py", "exec"), module.__dict__)
        return module

    return load


def from_defaults(module: Any, value: Any, needs: dict[str, dict[str, Any]]) -> Any:
    """The same settings in `module`, whose constructors are not given the later fields."""
    if isinstance(value, tuple):
        return tuple(from_defaults(module, item, needs) for item in value)
    if not isinstance(value, Section):
        return value
    name = type(value).__name__
    given = {
        field.name: from_defaults(module, getattr(value, field.name), needs)
        for field in dataclasses.fields(value)
        if field.default is dataclasses.MISSING or name == "RunConfig"
    }
    return getattr(module, name)(**given | needs.get(name, {}))


def fingerprints(run: Any, code: Code) -> dict[str, str]:
    """The fingerprint of each stage, without inputs."""
    return {s.name: fingerprint_of(preimage_of(s, run, code=code)) for s in STAGES}


@pytest.fixture(scope="module")
def code() -> Code:
    return Code(Path(__file__).parents[4])


@pytest.mark.parametrize("key", later_fields())
def test_another_default_of_a_field_is_another_fingerprint(key, edited, code):
    kind, name = key.split(".")
    needs = {kind: NEEDS[key]} if key in NEEDS else {}
    before = fingerprints(from_defaults(edited(SOURCE), RUN, needs), code)
    module = edited(with_default(key, another(key)))
    after = fingerprints(from_defaults(module, RUN, needs), code)
    field = next(f for f in dataclasses.fields(getattr(config, kind)) if f.name == name)
    if field.metadata.get("identity", True):
        assert {stage for stage in before if before[stage] != after[stage]}
    else:
        assert after == before


@pytest.mark.parametrize("key", later_fields())
def test_a_recipe_from_before_a_field_existed_keeps_its_meaning(key, edited):
    """What an older version wrote lacks the field, whatever its default is today."""
    kind, name = key.split(".")
    module = edited(with_default(key, another(key)))
    section = next(iter(find(from_defaults(edited(SOURCE), RUN, {}), kind)))
    older = {n: value for n, value in section.tree().items() if n != name}
    parsed = getattr(module, kind).from_tree(older)
    assert getattr(parsed, name) == NEUTRAL[key]
    assert parsed.canonical() == section.canonical()


def find(value: Any, kind: str) -> Iterator[Section]:
    """Yield every group of this kind inside `value`."""
    if isinstance(value, tuple):
        for item in value:
            yield from find(item, kind)
    elif isinstance(value, Section):
        if type(value).__name__ == kind:
            yield value
        for field in dataclasses.fields(value):
            yield from find(getattr(value, field.name), kind)


def test_the_table_has_each_field_that_was_added_later_and_no_other():
    assert sorted(NEUTRAL) == sorted(later_fields())


# Digests of the first entries of the table. Add a line for new entries; never change one: results
# of other settings would get the fingerprints of old ones.
FROZEN = {33: "2760c76c2068c39a", 34: "6615a2b5aa2f4d19", 35: "2496fa8b9b93eda5"}


def test_the_table_only_grows():
    entries = list(NEUTRAL.items())
    for count, digest in FROZEN.items():
        text = json.dumps(entries[:count])
        assert hashlib.sha256(text.encode()).hexdigest()[:16] == digest
