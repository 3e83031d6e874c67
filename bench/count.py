"""Count what a reader of the code has to hold in the head: python -m bench.count [DIR].

Reads files only. By package: lines; classes; requests, classes of parameters; times, numbers that
decide how long or how often something is tried; retries, loops that try again; pools of threads or
processes. A literal counts as much as a constant, so a name or an inlined number changes nothing.
`tests/unit/architecture/test_budgets.py` holds the ceilings.
"""

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields
from pathlib import Path

CONTROL_PLANE = ("flows", "infra", "deployments", "nanochat_flows")
PACKAGES = (*CONTROL_PLANE, "nanochat_core", "tasks")
_WAITING = {"sleep", "wait", "pause", "wait_for", "join", "poll", "select", "acquire", "wait_out"}
_POOLS = {"ThreadPoolExecutor", "ProcessPoolExecutor", "in_parallel", "transfer_each", "read_all"}
_TIME = re.compile(
    r"timeout|every|ttl|patience|deadline|retries|tries|attempts|delay|interval|pause|seconds|grace"
    r"|backoff|rounds|reads|swaps|looks|lives|starts|poll|wait",
    re.IGNORECASE,
)
_REQUEST = re.compile(r"(Request|Options|Recipe|Redo|Grid|On[A-Z]\w+|In[A-Z]\w+)$")


@dataclass(frozen=True)
class Count:
    """What one package has."""

    lines: int = 0
    classes: int = 0
    requests: int = 0
    times: int = 0
    retries: int = 0
    pools: int = 0

    def __add__(self, other: "Count") -> "Count":
        return Count(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


def count(folder: Path) -> Count:
    """Return the counts of all Python files below a folder."""
    return sum((_count_file(path.read_text()) for path in folder.rglob("*.py")), Count())


def _count_file(text: str) -> Count:
    nodes = list(ast.walk(ast.parse(text)))
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    return Count(
        lines=len(text.splitlines()),
        classes=len(classes),
        requests=sum(bool(_REQUEST.search(node.name)) for node in classes),
        times=len(list(_times(nodes))),
        retries=sum(_tries_again(n) for n in nodes if isinstance(n, ast.While | ast.For)),
        pools=sum(_name_of(node.func) in _POOLS for node in calls),
    )


def _times(nodes: list[ast.AST]) -> Iterator[ast.expr]:
    """Yield the numbers given to a wait, or to a name that is one of a time or of tries."""
    for node in nodes:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if _TIME.search(name):
                given = [value]
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value) if _TIME.search(
                name
            ):
                given = [value]
            case ast.Call(func=func, args=args, keywords=keywords):
                given = list(args) if _name_of(func) in _WAITING else []
                given += [k.value for k in keywords if k.arg and _TIME.search(k.arg)]
            case _:
                continue
        yield from (value for value in given if _is_number(value))


def _tries_again(loop: ast.While | ast.For) -> bool:
    """Return whether a loop has a `try`, and waits or continues."""
    inside = list(ast.walk(loop))
    waits = any(isinstance(n, ast.Call) and _name_of(n.func) in _WAITING for n in inside)
    continues = any(isinstance(n, ast.Continue) for n in inside)
    return any(isinstance(n, ast.Try) for n in inside) and (waits or continues)


def _name_of(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _is_number(value: ast.expr) -> bool:
    match value:
        case ast.Constant(value=bool() | 0):
            return False
        case ast.Constant(value=int() | float()):
            return True
        case ast.BinOp(left=left, right=right):
            return _is_number(left) and _is_number(right)
        case _:
            return False


def main(root: Path) -> None:
    """Print a row for each package, and one for the control plane."""
    rows = {name: count(root / name) for name in PACKAGES}
    rows["control plane"] = sum((rows[name] for name in CONTROL_PLANE), Count())
    rows["tests"] = Count(lines=count(root / "tests").lines)
    names = [field.name for field in fields(Count)]
    print(f"{'':16}", *(f"{name:>9}" for name in names))
    for name, row in rows.items():
        print(f"{name:16}", *(f"{number:9,}" for number in astuple(row)))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
