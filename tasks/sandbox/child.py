"""The code that runs inside the sandbox: a program, or the tester that checks one.

`tasks.sandbox.process` passes this file, compiled, to an interpreter (`python -c`), whichever is
installed: it imports nothing of ours, no site packages, and of the standard library only built-in
modules, as importing `json` takes as long as starting the interpreter. Standard input has an order
as JSON: `limits` and `confine`, which are applied before anything else, the pipe `life`, and

    {"program": source, "requests": fd, "replies": fd}
    {"setup": source, "test": source, "entry_point": name,
     "requests": fd, "replies": fd, "verdict": fd}

The second is the tester's. It reads a nonce from `life` at the end, and writes one line to
`verdict`: the nonce, or `!` and a reason. Its requests and the program's replies are lines of JSON.
The first reply lists the names that the program defined, each further one has the result of a call.
Values are copied as plain built-in types (see `plain`), so no object of the program's, such as one
that equals everything, takes part in a comparison.
"""

import builtins
import posix
import sys
from _json import encode_basestring_ascii, make_encoder, make_scanner  # the C parts of `json`

MAX_LINE = 4 << 20  # bytes of one request or reply
MAX_ITEMS = 1 << 20  # of an iterator that is copied
LONG_INT = 4096  # bits; longer ones are sent as hex, as Python limits conversions to decimal
NAME = "__main__"  # a program's `__name__`, so that its main block runs, as in a terminal


def main():
    """Execute the order on standard input, write the verdict, and end the process."""
    order = parsed(_read_all(0))
    _empty_input()
    fault = ""
    try:
        _set_limits(order["limits"])
        globals()["confine"](order["confine"], order["life"])  # tasks.sandbox.landlock
        run = run_tester if "verdict" in order else run_program
        run(order)
    except BaseException as error:  # noqa: BLE001 (SystemExit too: the check was not reached)
        fault = "! " + ": ".join(filter(None, described(error)))
    if "verdict" in order:
        nonce = posix.read(order["life"], 100)
        _write(order["verdict"], f"{fault}\n".encode("ascii", "replace") if fault else nonce)
    # Not sys.exit: exit handlers of the program must not run.
    posix._exit(1 if fault else 0)


def run_program(order):
    """Run a program, then execute requested calls of its functions until the pipe is closed."""
    replies = order["replies"]
    names: dict = {"__name__": NAME}
    try:
        exec(compile(order["program"], "<program>", "exec"), names)
        first = line_of({"names": [name for name in names if isinstance(name, str)]})
    except BaseException as error:  # noqa: BLE001
        first = _error(error)
    _flush()
    _write(replies, first)
    with open(order["requests"], "rb") as requests:
        for line in requests:
            request = parsed(line)
            try:
                args = [decoded(value) for value in request["args"]]
                kwargs = {key: decoded(value) for key, value in request["kwargs"].items()}
                reply = line_of({"value": plain(names[request["name"]](*args, **kwargs))})
            except BaseException as error:  # noqa: BLE001
                reply = _error(error)
            _flush()
            _write(replies, reply)


def run_tester(order):
    """Run a test's `check` on a stand-in for the entry point, which calls the program.

    Of the setup's functions the test has only those that the program defines too.
    """
    with open(order["replies"], "rb") as replies:

        def reply():
            line = replies.readline(MAX_LINE)
            if not line.endswith(b"\n"):
                raise EOFError("the program ended, or gave an answer of more than 4 MiB")
            answer = parsed(line)
            if "error" in answer:
                name, message = map(str, answer["error"])
                # Only built-in exceptions: the tests may expect one, such as a ValueError.
                kind = getattr(builtins, name, None)
                if isinstance(kind, type) and issubclass(kind, Exception):
                    raise kind(message)
                raise RuntimeError(f"{name}: {message}" if message else name)
            return answer

        def stand_in(*args, **kwargs):
            request = {
                "name": order["entry_point"],
                "args": [plain(value) for value in args],
                "kwargs": {key: plain(value) for key, value in kwargs.items()},
            }
            _write(order["requests"], line_of(request))
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


def plain(value):
    """Return a value of built-in types, or of a few others, as JSON has it; see `decoded`.

    Subclasses become their base class. Raises TypeError for other types.
    """
    if value is None:
        return None
    for kind, convert in PLAIN.items():
        if isinstance(value, kind):
            return convert(value)
    for module, name in RARER:
        kind = getattr(sys.modules.get(module), name, None)
        if isinstance(kind, type) and isinstance(value, kind):
            return {name: _list(value) if name == "deque" else str(value)}
    if hasattr(type(value), "__next__"):
        return {"iterator": [plain(item) for _, item in zip(range(MAX_ITEMS), value, strict=False)]}
    return _refuse(value)


def _refuse(value):
    raise TypeError(f"a value of type {type(value).__name__} cannot be handed over")


def _list(values):
    return [plain(value) for value in values]


def _int(value):
    # Through int's own methods: a subclass may override them.
    return {"int": hex(int.__add__(value, 0))} if int.bit_length(value) > LONG_INT else value


def decoded(value):
    """Return a value from the parsed JSON of what `plain` gave."""
    if isinstance(value, list):
        return [decoded(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    return DECODERS[kind](content)


def _same(value):
    return value


def _tagged(kind, convert=_list):
    return lambda value: {kind.__name__: convert(value)}


def _made_of_text(module, name):
    return lambda content: getattr(__import__(module), name)(content)


COLLECTIONS = (tuple, set, frozenset, type({}.keys()), type({}.values()), type({}.items()))
PLAIN = {  # the order matters: a bool is an int too
    bool: _same,
    int: _int,
    float: _same,
    str: _same,
    list: _list,
    dict: _tagged(dict, lambda value: [_list(pair) for pair in value.items()]),
    **{kind: _tagged(kind) for kind in COLLECTIONS},
    bytes: _tagged(bytes, bytes.hex),
    bytearray: _tagged(bytearray, bytearray.hex),
    complex: _tagged(complex, lambda value: [value.real, value.imag]),
    range: _tagged(range, lambda value: _list((value.start, value.stop, value.step))),
}
RARER = (("fractions", "Fraction"), ("decimal", "Decimal"), ("collections", "deque"))
DECODERS = {
    "dict": lambda pairs: {decoded(key): decoded(item) for key, item in pairs},
    "tuple": lambda items: tuple(map(decoded, items)),
    "set": lambda items: set(map(decoded, items)),
    "frozenset": lambda items: frozenset(map(decoded, items)),
    "dict_keys": lambda items: dict.fromkeys(map(decoded, items)).keys(),
    "dict_values": lambda items: dict(enumerate(map(decoded, items))).values(),
    "dict_items": lambda items: dict(map(decoded, items)).items(),
    "iterator": lambda items: iter([decoded(item) for item in items]),
    "int": lambda text: int(text, 16),
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    "complex": lambda pair: complex(*pair),
    "range": lambda three: range(*map(decoded, three)),
    "Fraction": _made_of_text("fractions", "Fraction"),
    "Decimal": _made_of_text("decimal", "Decimal"),
    "deque": lambda items: __import__("collections").deque(map(decoded, items)),
}


class _Dialect:
    """The settings of JSON's scanner, as `json.loads` has them."""

    strict = True
    object_hook = object_pairs_hook = None
    parse_float, parse_int = float, int
    parse_constant = {"NaN": float("nan"), "Infinity": 1e999, "-Infinity": -1e999}.__getitem__


_scan = make_scanner(_Dialect())  # pyright: ignore[reportArgumentType] (any with these names)
_encode = make_encoder(None, _refuse, encode_basestring_ascii, None, ":", ",", False, False, True)


def parsed(data):
    """Parse a line of JSON. Raises ValueError if it is not JSON."""
    try:
        return _scan(data.decode("ascii"), 0)[0]
    except StopIteration:
        raise ValueError("no JSON") from None


def line_of(tree):
    """Return a line of JSON in ASCII, the inverse of `parsed`."""
    return "".join(_encode(tree, 0)).encode() + b"\n"


def described(error):
    """Return the type of an exception, and its message as one short line of ASCII."""
    try:
        message = " ".join(ascii(str(error))[1:-1].split())
    except BaseException:  # noqa: BLE001 (a program's own exception may do anything)
        message = ""
    return type(error).__name__[:100], message[:200]


def _error(error):
    return line_of({"error": described(error)})


def _set_limits(limits):
    """Set the limits, by the names of `resource`, so that they cannot be raised again."""
    import resource  # imported late: a shared library of its own

    # Soft and hard limit: without privileges a hard limit cannot be raised.
    for name, value in limits.items():
        resource.setrlimit(getattr(resource, name), (value, value))


def _empty_input():
    """Replace standard input, a file that a program could rewind, by an empty pipe."""
    empty, end = posix.pipe()
    posix.close(end)
    posix.dup2(empty, 0)
    posix.close(empty)


def _flush():
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:  # noqa: BLE001 (closed or replaced by the program)
            continue


def _read_all(fd):
    data = b""
    while more := posix.read(fd, 1 << 20):
        data += more
    return data


def _write(fd, data):
    while data:
        data = data[posix.write(fd, data) :]


if __name__ == "__main__":
    main()
