"""The code that runs inside the sandbox: a whole program, or one of the two processes of a check.

`tasks.sandbox.run` passes this file, compiled, to an interpreter (`python -c`), whichever is
installed: it imports nothing of ours, no site packages, and of the standard library only built-in
modules, as importing `json` takes as long as starting the interpreter. Standard input has the
length of an order in bytes and a newline, then the order as JSON: `limits`, which are set before
anything else, and one of

    {"role": "program", "program": source, "verdict": fd}
    {"role": "candidate", "program": source, "requests": fd, "replies": fd}
    {"role": "tester", "setup": source, "test": source, "entry_point": name,
     "requests": fd, "replies": fd, "verdict": fd}

A process with `verdict` gets a nonce after the order, and writes one line to `verdict`: the nonce,
or `!` and a reason. A tester's requests and a candidate's replies are lines of JSON. The first
reply lists the names that the program defined, each further one has the result of a call. Values
are copied as plain built-in types (see `encoded`), so no object of the program's, such as one that
equals everything, takes part in a comparison.
"""

import builtins
import posix
import sys
from _json import encode_basestring_ascii, make_scanner  # the C parts of `json`

MAX_LINE = 4 << 20  # bytes of one request or reply
MAX_ITEMS = 1 << 20  # of an iterator that is copied
LONG_INT = 4096  # bits; longer ones are sent as hex, as Python limits conversions to decimal
NAME = "__main__"  # a program's `__name__`, so that its main block runs, as in a terminal


def main():
    """Execute the order on standard input, write the verdict, and end the process."""
    order = parsed(_read(0, int(_read_line(0))))
    fault = ""
    try:
        _set_limits(order["limits"])
        globals()["confine"](order["confine"])  # tasks.sandbox.landlock, passed with this file
        ROLES[order["role"]](order)
    except BaseException as error:  # noqa: BLE001 (SystemExit too: the check was not reached)
        fault = "! " + ": ".join(filter(None, described(error)))
    if "verdict" in order:
        line = f"{fault}\n".encode("ascii", "replace") if fault else _read_line(order["nonce"])
        # The nonce is still unread in the pipe: code that ran before had to find it there.
        posix.write(order["verdict"], line)
    # Not sys.exit: exit handlers of the program must not run.
    posix._exit(1 if fault else 0)


def run_program(order):
    """Run a whole program that contains its own tests."""
    _hide_input(order)
    exec(compile(order["program"], "<program>", "exec"), {"__name__": NAME})
    _flush()


def run_candidate(order):
    """Run a program, then execute requested calls of its functions until the pipe is closed."""
    _hide_input(order)
    replies = order["replies"]
    names: dict = {"__name__": NAME}
    try:
        exec(compile(order["program"], "<program>", "exec"), names)
        first = f'{{"names":{encoded([name for name in names if isinstance(name, str)])}}}'
    except BaseException as error:  # noqa: BLE001
        first = _error(error)
    _flush()
    _write_line(replies, first)
    with open(order["requests"], "rb") as requests:
        for line in requests:
            request = parsed(line)
            try:
                args = [decoded(value) for value in request["args"]]
                kwargs = {key: decoded(value) for key, value in request["kwargs"].items()}
                reply = f'{{"value":{encoded(names[request["name"]](*args, **kwargs))}}}'
            except BaseException as error:  # noqa: BLE001
                reply = _error(error)
            _flush()
            _write_line(replies, reply)


def run_tester(order):
    """Run a test's `check` on a stand-in for the entry point, which calls the candidate.

    Of the setup's functions the test has only those that the program defines too.
    """
    _hide_input(order)
    requests = order["requests"]
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
                raise RuntimeError(message)
            return answer

        def stand_in(*args, **kwargs):
            given = ",".join(encoded(value) for value in args)
            named = ",".join(f"{encoded(key)}:{encoded(kwargs[key])}" for key in kwargs)
            name = encoded(order["entry_point"])
            _write_line(requests, f'{{"name":{name},"args":[{given}],"kwargs":{{{named}}}}}')
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
    """Encode a value of plain built-in types, or of a few others, as JSON.

    Subclasses become their base class. Raises TypeError for other types.
    """
    if value is None:
        return "null"
    for kind, encode in ENCODERS.items():
        if isinstance(value, kind):
            return encode(value)
    return _encoded_rarer(value)


def _encoded_int(value):
    # Through int's own methods: a subclass may override them.
    if int.bit_length(value) > LONG_INT:
        return f'{{"int":"{hex(int.__add__(value, 0))}"}}'
    return int.__repr__(value)


def _encoded_dict(value):
    pairs = (f"[{encoded(key)},{encoded(item)}]" for key, item in value.items())
    return f'{{"dict":[{",".join(pairs)}]}}'


def _as_list_named(kind):
    return lambda value: f'{{"{kind.__name__}":[{",".join(map(encoded, value))}]}}'


def _encoded_rarer(value):
    for module, name in RARER:
        kind = getattr(sys.modules.get(module), name, None)
        if isinstance(kind, type) and isinstance(value, kind):
            content = list(value) if name == "deque" else str(value)
            return f'{{"{name}":{encoded(content)}}}'
    if hasattr(type(value), "__next__"):
        items = [item for _, item in zip(range(MAX_ITEMS), value, strict=False)]
        return f'{{"iterator":{encoded(items)}}}'
    raise TypeError(f"a value of type {type(value).__name__} cannot be handed over")


def decoded(value):
    """Decode a value from the parsed JSON of `encoded`."""
    if isinstance(value, list):
        return [decoded(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    return DECODERS[kind](content)


def _made_of_text(module, name):
    return lambda content: getattr(__import__(module), name)(content)


FLOATS = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}  # as JSON's scanner reads them
COLLECTIONS = (tuple, set, frozenset, type({}.keys()), type({}.values()), type({}.items()))
ENCODERS = {  # the order matters: a bool is an int too
    bool: lambda value: "true" if value else "false",
    int: _encoded_int,
    float: lambda value: FLOATS.get(float.__repr__(value), float.__repr__(value)),
    str: encode_basestring_ascii,
    list: lambda value: f"[{','.join(map(encoded, value))}]",
    dict: _encoded_dict,
    **{kind: _as_list_named(kind) for kind in COLLECTIONS},
    bytes: lambda value: f'{{"bytes":"{value.hex()}"}}',
    bytearray: lambda value: f'{{"bytearray":"{value.hex()}"}}',
    complex: lambda value: f'{{"complex":{encoded([value.real, value.imag])}}}',
    range: lambda value: f'{{"range":{encoded([value.start, value.stop, value.step])}}}',
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


def parsed(data):
    """Parse a line of JSON. Raises ValueError if it is none."""
    try:
        return _scan(data.decode("ascii"), 0)[0]
    except StopIteration:
        raise ValueError("no JSON") from None


def described(error):
    """Return the type of an exception, and its message as one short line of ASCII."""
    try:
        message = " ".join(ascii(str(error))[1:-1].split())
    except BaseException:  # noqa: BLE001 (a program's own exception may do anything)
        message = ""
    return type(error).__name__[:100], message[:200]


def _error(error):
    return f'{{"error":{encoded(list(described(error)))}}}'


def _set_limits(limits):
    """Set the limits, by the names of `resource`, so that they cannot be raised again."""
    import resource  # imported late: a shared library of its own

    # Soft and hard limit: without privileges a hard limit cannot be raised.
    for name, value in limits.items():
        resource.setrlimit(getattr(resource, name), (value, value))


def _hide_input(order):
    """Move standard input, which may hold the nonce, and replace it by an empty one."""
    order["nonce"] = posix.dup(0)
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


def _read(fd, size):
    data = b""
    while len(data) < size:
        more = posix.read(fd, size - len(data))
        if not more:
            raise EOFError("the order is cut short")
        data += more
    return data


def _read_line(fd):
    line = b""
    while not line.endswith(b"\n"):
        line += _read(fd, 1)
    return line


def _write_line(fd, text):
    data = text.encode() + b"\n"
    while data:
        data = data[posix.write(fd, data) :]


if __name__ == "__main__":
    main()
