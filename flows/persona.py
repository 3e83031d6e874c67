"""Give a run a persona: a file of conversations in place of those about the model itself."""

import dataclasses
import json
import re
import unicodedata
from collections.abc import Iterator

from flows.profiles import PROFILES
from flows.stages import STAGES
from nanochat_core.config import (
    ChatTrainConfig,
    DatasetConfig,
    EvalTaskConfig,
    MixtureEntry,
    RunConfig,
)
from nanochat_core.errors import ConfigError
from nanochat_core.runtime.seeding import seed_for
from nanochat_core.section import shown
from tasks.generated import conversation, identity, persona
from tasks.generated.persona import Persona
from tasks.names import all_names

NUM_TRAIN = 1000  # conversations, as many as nanochat's guide generates
NUM_TEST = 100
MAX_NEW_TOKENS = 64  # of an answer to a question for testing
_SUBSTITUTE = "persona"  # for a name without Latin letters; added to the name of something else
_REPLACED = (conversation.NAME, identity.NAME)  # tasks that say who the model is


def make_persona(name: str, *, maker: str, character: str, facts: tuple[str, ...]) -> Persona:
    """Return a persona. Each of `facts` is ABOUT=VALUE. Raises ConfigError for a wrong value."""
    pairs: dict[str, str] = {}
    topics: dict[str, str] = {}
    for about, value in map(parse_fact, facts):
        other = topics.setdefault(persona.topic_of(about), about)
        if other != about:
            raise ConfigError(f"'{other}' and '{about}' have one answer", hint="give one of them")
        if about in pairs:
            raise ConfigError(f"there are two facts about '{about}'", hint="give one of them")
        pairs[about] = value
    found = Persona(
        name=name.strip(),
        maker=maker.strip(),
        character=character.strip().rstrip("."),
        facts=tuple(pairs.items()),
    )
    for text in (found.name, found.maker, found.character, *pairs, *pairs.values()):
        if not text or not text.isprintable() or re.search(r"[{}]", text):
            raise ConfigError(
                f"{shown(text)} cannot be said by the model",
                hint="give a text of one line without braces",
            )
    return found


def parse_fact(fact: str) -> tuple[str, str]:
    """Return what a fact ABOUT=VALUE is about, and its value. Raises ConfigError."""
    about, equals, value = fact.partition("=")
    about = re.sub(r"^(my|your) ", "", " ".join(about.lower().split()))
    value = value.strip().rstrip(".")
    if not (equals and about and value):
        raise ConfigError(
            f"{shown(fact)} is not of the form ABOUT=VALUE",
            hint='for example --fact "best friend=a hedgehog called Otto"',
        )
    return about, value


def persona_lines(run: RunConfig, found: Persona) -> Iterator[str]:
    """Yield the lines of the file of conversations that `run` needs for a persona.

    A run that trains on the task `conversation` gets as many of its conversations, with the
    persona's turns among theirs.
    """
    mixed, seed = _mixed_number(run), seed_for(run.seed, "persona")
    number = mixed or NUM_TRAIN
    for line in persona.generate(
        found, num_train=number, num_test=NUM_TEST, mixed=mixed > 0, seed=seed
    ):
        yield json.dumps(line, ensure_ascii=False)


def with_persona(run: RunConfig, found: Persona, path: str) -> RunConfig:
    """Return `run` with the file at `path` in place of the tasks that say who the model is.

    Both mixtures get it, and the chat evaluation asks its questions for testing.
    """
    name = slug(found.name)
    data = DatasetConfig(name=name, grade=1, num_train=None, num_test=None, path=path)
    unused = set(_REPLACED) - {run.rl.task}
    kept = [entry for entry in run.task_data.datasets if entry.name not in unused]
    questions = EvalTaskConfig(name=name, max_examples=NUM_TEST, max_new_tokens=MAX_NEW_TOKENS)
    tasks = [task for task in run.chat_eval.tasks if task.name not in _REPLACED]
    is_mixed = _mixed_number(run) > 0
    return dataclasses.replace(
        run,
        task_data=dataclasses.replace(run.task_data, datasets=(data, *kept)),
        midtrain=_mixed_in(run.midtrain, name, is_mixed=is_mixed),
        sft=_mixed_in(run.sft, name, is_mixed=is_mixed),
        chat_eval=dataclasses.replace(run.chat_eval, tasks=(questions, *tasks)),
    )


def _mixed_number(run: RunConfig) -> int:
    """Return how many conversations of the task `conversation` a run trains on."""
    trained = {entry.task for chat in (run.midtrain, run.sft) for entry in chat.mixture}
    numbers = [d.num_train or 0 for d in run.task_data.datasets if d.name == conversation.NAME]
    return numbers[0] if numbers and conversation.NAME in trained else 0


def _mixed_in(chat: ChatTrainConfig, name: str, *, is_mixed: bool) -> ChatTrainConfig:
    """Return the training with the file in its mixture; one of no conversations stays so."""
    if not chat.mixture:
        return chat
    kept = [entry for entry in chat.mixture if entry.task not in _REPLACED]
    epochs = [entry.epochs for entry in chat.mixture if entry.task in _REPLACED]
    whole = MixtureEntry(task=name, num_examples=None, epochs=max(epochs, default=1))
    # Mixed: as many conversations as before, of the same part of the split.
    mixed = [entry for entry in chat.mixture if is_mixed and entry.task == conversation.NAME]
    own = [dataclasses.replace(entry, task=name) for entry in mixed] or [whole]
    return dataclasses.replace(chat, mixture=(*own, *kept))


def slug(name: str) -> str:
    """Return the name of a persona's files, dataset and run: small letters, digits and dashes.

    Raises ConfigError for a name without letters and digits.
    """
    if not any(map(str.isalnum, name)):
        raise ConfigError(
            f"{shown(name)} is not a name: it has no letter and no digit",
            hint="the first argument is the name that the model gets, such as Juniper",
        )
    found = _latin(name) or _SUBSTITUTE
    return f"{found}-{_SUBSTITUTE}" if _is_taken(found) else found


def slug_reason(name: str) -> str | None:
    """Return why `slug` is another word than the name; None if it is the name in small letters."""
    found = _latin(name)
    if not found:
        return f"{shown(name)} has no Latin letters or digits, which files and runs are named with"
    return f"a profile, stage or task is called {found}" if _is_taken(found) else None


def _latin(name: str) -> str:
    """Return the Latin letters and digits of a name, with dashes between its words; may be ""."""
    plain = unicodedata.normalize("NFKD", name.lower()).encode("ascii", "ignore").decode()
    return re.sub(r"[^a-z0-9]+", "-", plain).strip("-")


def _is_taken(name: str) -> bool:
    return name in {*all_names(), *PROFILES, *(stage.name for stage in STAGES), "core"}
