"""A row of HumanEval's shape."""

ROW = {
    "task_id": "Made/0",
    "prompt": "from typing import List\nimport math\n\n\n"
    "def roots(xs: List[float]) -> List[float]:\n"
    '    """Square roots.\n    >>> roots([4.0])\n    [2.0]\n    """\n',
    "canonical_solution": "    return [math.sqrt(x) for x in xs]\n",
    "test": "\n\nMETADATA = {}\n\n\ndef check(candidate):\n    assert candidate([4.0]) == [2.0]\n"
    "    assert candidate([]) == []\n    assert math.fabs(candidate([2.0])[0] - 1.41421) < 1e-4\n",
    "entry_point": "roots",
}
