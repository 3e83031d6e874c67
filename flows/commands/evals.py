"""`nanochat evals`: judge a model again and again, and hear of it when it gets worse."""

from cyclopts import App, Group


def make_evals_app(*, group: Group, sort_key: int) -> App:
    """The group of commands."""
    return App(
        name="evals",
        help="Judge a model again and again, and hear of it when it gets worse.",
        group=group,
        group_commands=Group("Commands"),
        sort_key=sort_key,
    )
