"""The location of each task: its name, and the module and attribute that define it.

To add a task, write a module with a `GeneratedTask` or a `HubTask` and add it here; or, in another
package, declare it as an entry point of the group `GROUP`. A module is imported when its task
is used (tasks/registry.py), so that a stage loads, and its fingerprint covers, only the tasks that
its configuration names.
"""

from tasks import plugins

GROUP = "nanochat_flows.tasks"

TASKS: dict[str, str] = {
    "arithmetic": "tasks.generated.arithmetic:TASK",
    "conversation": "tasks.generated.conversation:TASK",
    "identity": "tasks.generated.identity:TASK",
    "spelling": "tasks.generated.spelling:TASK",
    "simple_spelling": "tasks.generated.spelling_bee:SIMPLE",
    "spelling_bee": "tasks.generated.spelling_bee:BEE",
    "smoltalk": "tasks.smoltalk:TASK",
    "mmlu": "tasks.mmlu:TASK",
    "arc_easy": "tasks.arc:EASY",
    "arc_challenge": "tasks.arc:CHALLENGE",
    "gsm8k": "tasks.gsm8k:TASK",
    "humaneval": "tasks.humaneval:TASK",
}
# Graders outside their task's module, so that preparing examples does not load the sandbox.
GRADERS: dict[str, str] = {"humaneval": "tasks.sandbox.humaneval_grader:GRADER"}


def references_of(name: str) -> list[str]:
    """Return `module:attribute` of the tasks called `name`, of `TASKS` or of installed packages."""
    if name in TASKS:
        return [TASKS[name]]
    return plugins.references(GROUP, name)


def all_names() -> list[str]:
    """Return the names of all tasks, sorted."""
    return sorted({*TASKS, *plugins.names(GROUP)})


def modules_of(name: str, *, grades: bool) -> tuple[str, ...]:
    """Return the modules imported for the task `name`, with those of its grader if it `grades`.

    A dataset that is no task has none.
    """
    references = [*references_of(name), *([GRADERS[name]] if grades and name in GRADERS else [])]
    return tuple(reference.partition(":")[0] for reference in references)
