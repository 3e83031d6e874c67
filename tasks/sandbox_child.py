"""What runs inside the sandbox: the program, or one of the two ends of a check.

`tasks.sandbox` hands this file's text to an interpreter (`python -c`), whichever is installed: it
imports nothing of ours and no site packages. Standard input brings the length of an order in bytes
and a newline, the order as JSON, then the nonce that says "passed". An order is

    {"role": "program", "program": source, "verdict": fd}
    {"role": "candidate", "program": source, "requests": fd, "replies": fd}
    {"role": "tester", "setup": source, "test": source, "entry_point": name,
     "requests": fd, "replies": fd, "verdict": fd}

Over `verdict` goes one line: the nonce, or `!` and why not. A tester's requests and a candidate's
replies are lines of JSON. The first reply says which names the program defined, each further one
what a call gave. Values cross as copies in plain built-in types (see `encoded`), so nothing that a
program made, such as an object equal to everything, takes part in a comparison.
"""

import builtins
import contextlib
import json
import os
import sys

MAX_LINE = 4 << 20  # bytes of one request or reply
NAME = "__main__"  # what a program finds as `__name__`: demonstrations are run, as by hand


def main():
    """Carries out the order on standard input, says how it went, and ends the process."""
    order = json.loads(_read(0, int(_read_line(0))))
    fault = ""
    try:
        ROLES[order["role"]](order)
    except BaseException as error:  # noqa: BLE001 (SystemExit too: the check was not reached)
        fault = "! " + ": ".join(filter(None, described(error)))
    if "verdict" in order:
        line = fault.encode("ascii", "replace") or _read_line(order["nonce"])
        os.write(order["verdict"], line)
    os._exit(1 if fault else 0)


def run_program(order):
    """Runs a whole program, which has its tests within."""
    _hide_input(order)
    exec(compile(order["program"], "<program>", "exec"), {"__name__": NAME})
    _flush()


def run_candidate(order):
    """Runs a program, then answers calls of what it defined until nobody asks any more."""
    _hide_input(order)
    replies = order["replies"]
    names: dict = {"__name__": NAME}
    try:
        exec(compile(order["program"], "<program>", "exec"), names)
        first = {"names": [name for name in names if isinstance(name, str)]}
    except BaseException as error:  # noqa: BLE001
        first = {"error": described(error)}
    _flush()
    _write_line(replies, first)
    with os.fdopen(order["requests"], "rb") as requests:
        for line in requests:
            request = json.loads(line)
            try:
                args = [decoded(value) for value in request["args"]]
                kwargs = {key: decoded(value) for key, value in request["kwargs"].items()}
                reply = json.dumps({"value": encoded(names[request["name"]](*args, **kwargs))})
            except BaseException as error:  # noqa: BLE001
                reply = json.dumps({"error": described(error)})
            _flush()
            _write(replies, reply.encode() + b"\n")


def run_tester(order):
    """Runs `check` of a test on a stand-in for the entry point, whose calls the candidate answers.

    Functions that the setup defines are there for the test where the program defines them too.
    """
    _hide_input(order)
    requests = order["requests"]
    with os.fdopen(order["replies"], "rb") as replies:

        def reply():
            line = replies.readline(MAX_LINE)
            if not line.endswith(b"\n"):
                raise EOFError("the program ended, or gave an answer of more than 4 MiB")
            answer = json.loads(line)
            if "error" in answer:
                name, message = map(str, answer["error"])
                kind = getattr(builtins, name, None)
                if isinstance(kind, type) and issubclass(kind, Exception):
                    raise kind(message)
                raise RuntimeError(message)
            return answer

        def stand_in(*args, **kwargs):
            request = {
                "name": order["entry_point"],
                "args": [encoded(value) for value in args],
                "kwargs": {key: encoded(value) for key, value in kwargs.items()},
            }
            _write_line(requests, request)
            return decoded(reply()["value"])

        defined = set(reply()["names"])
        if order["entry_point"] not in defined:
            raise NameError(f"the program defines no '{order['entry_point']}'")
        names: dict = {"__name__": NAME}
        exec(compile(order["setup"], "<setup>", "exec"), names)
        for name in [name for name in names if getattr(names[name], "__module__", "") == NAME]:
            if name not in defined:
                del names[name]
        names[order["entry_point"]] = stand_in
        exec(compile(order["test"], "<test>", "exec"), names)
        names["check"](stand_in)


ROLES = {"program": run_program, "candidate": run_candidate, "tester": run_tester}


def encoded(value):
    """A value of plain built-in types as JSON can carry it; subclasses become what they derive
    from. Raises TypeError for others."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [encoded(item) for item in value]
    if isinstance(value, dict):
        return {"dict": [[encoded(key), encoded(item)] for key, item in value.items()]}
    for kind in (tuple, set, frozenset):
        if isinstance(value, kind):
            return {kind.__name__: [encoded(item) for item in value]}
    if isinstance(value, (bytes, bytearray)):
        return {type(value).__name__: value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, range):
        return {"range": [value.start, value.stop, value.step]}
    raise TypeError(f"a value of type {type(value).__name__} cannot be handed over")


def decoded(value):
    """The reverse of `encoded`."""
    if isinstance(value, list):
        return [decoded(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    return DECODERS[kind](content)


DECODERS = {
    "dict": lambda pairs: {decoded(key): decoded(item) for key, item in pairs},
    "tuple": lambda items: tuple(map(decoded, items)),
    "set": lambda items: set(map(decoded, items)),
    "frozenset": lambda items: frozenset(map(decoded, items)),
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    "complex": lambda pair: complex(*pair),
    "range": lambda three: range(*three),
}


def described(error):
    """The type of an exception, and its message in one short line of ASCII."""
    try:
        message = " ".join(ascii(str(error))[1:-1].split())
    except BaseException:  # noqa: BLE001 (a program's own exception may do anything)
        message = ""
    return type(error).__name__[:100], message[:200]


def _hide_input(order):
    """Moves standard input, which holds the nonce, and leaves an empty one in its place."""
    order["nonce"] = os.dup(0)
    empty, end = os.pipe()
    os.close(end)
    os.dup2(empty, 0)
    os.close(empty)


def _flush():
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed or replaced by the program
            stream.flush()


def _read(fd, size):
    data = b""
    while len(data) < size:
        more = os.read(fd, size - len(data))
        if not more:
            raise EOFError("the order is cut short")
        data += more
    return data


def _read_line(fd):
    line = b""
    while not line.endswith(b"\n"):
        line += _read(fd, 1)
    return line


def _write_line(fd, value):
    _write(fd, json.dumps(value).encode() + b"\n")


def _write(fd, data):
    while data:
        data = data[os.write(fd, data) :]


if __name__ == "__main__":
    main()
