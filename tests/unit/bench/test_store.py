"""When the comparison with other tools counts as failed."""

from bench.store import find_failures, find_peers


def times(ours: float, *theirs: float) -> dict[str, dict[str, list[float]]]:
    peers = {f"aws-{n}": [s, 9 * s, 0.0] for n, s in enumerate(theirs)}
    return {"push": {"nanochat": [ours, ours, 99.0], **peers, "rclone": [0.001]}}


def test_only_the_fastest_aws_counts_and_by_its_median() -> None:
    assert find_failures(times(10.0, 9.0, 30.0), at_least=0.9) == []
    assert find_failures(times(10.0, 30.0, 8.9), at_least=0.9) == [
        "push: 0.89 times aws-1, at least 0.9 is wanted"
    ]
    assert find_failures(times(10.0, 8.9), at_least=0.8) == []


def test_without_an_aws_nothing_is_compared() -> None:
    assert find_failures(times(10.0), at_least=0.9) == []


def test_each_direction_counts() -> None:
    both = times(1.0, 2.0) | {"pull": times(4.0, 2.0)["push"]}
    (line,) = find_failures(both, at_least=0.9)
    assert line.startswith("pull: 0.50 times aws-0")


def test_tools_that_are_not_here_are_left_out() -> None:
    assert find_peers(["/a", "/b"], None) == {"aws": "/a", "aws-2": "/b"}
    assert find_peers([None], "/r") == {"rclone": "/r"}
