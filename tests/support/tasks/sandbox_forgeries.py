"""Programs that try to be judged right while they are wrong, and right ones in unusual forms.

All are asked for `add(a, b)`, by the tests of `test_sandbox_verdicts`.
"""

# Where the check of a wrong answer follows: none of these may pass.
FORGED = {
    "end with status 0": "import os; os._exit(0)",
    "exit by exception": "raise SystemExit(0)",
    "print and exit": "import os; os.write(1, b'passed\\n'); os._exit(0)",
    "patch assertions": "import builtins\nclass A(Exception):\n    def __new__(c): return None\n"
    "builtins.AssertionError = A",
    "write to every file": "import os\nfor fd in range(3, 60):\n    try: os.write(fd, b'passed\\n')"
    "\n    except OSError: pass\nos._exit(0)",
    "close every file": "import os; os.closerange(3, 60)",
    "exit in a thread": "import os, threading\n"
    "threading.Thread(target=os._exit, args=(0,)).start()",
    "replace the process": "import os; os.execv('/usr/bin/true', ['true'])",
    "hide errors": "import sys; sys.excepthook = lambda *_: None",
    "end by a profile": "import os, sys\nsys.setprofile(lambda *_: os._exit(0))",
    "go on in a fork": "import os\nif os.fork(): os._exit(0)",
}

# These defeat tests in the same process; none may pass when they are judged from outside.
DECEIVED = {
    "equal to everything": "class E(int):\n    __eq__ = lambda s, o: True\n    __hash__ = None\n"
    "def add(a, b): return E(7)",
    "equal to everything, no number": "class E:\n    __eq__ = lambda s, o: True\n"
    "def add(a, b): return E()",
    "a list equal to everything": "class E(list):\n    __eq__ = lambda s, o: True\n"
    "def add(a, b): return E()",
    "take the answer from the test's frame": "import sys\ndef add(a, b):\n"
    "    frame = sys._getframe()\n    while frame:\n"
    "        for name in ('expected', 'wanted'):\n"
    "            if name in frame.f_locals: return frame.f_locals[name]\n"
    "        frame = frame.f_back",
    "read the nonce": "import os\nfor fd in range(60):\n    try: os.set_blocking(fd, False)\n"
    "    except OSError: pass\n"
    "found = b''\nfor fd in range(60):\n    try: found = found or os.read(fd, 99)\n"
    "    except OSError: pass\n"
    "for fd in range(60):\n    try: os.write(fd, found + b'\\n')\n    except OSError: pass\n"
    "os._exit(0)",
    "replace the check": "def check(candidate): pass\ndef add(a, b): return 0\n"
    "import builtins; builtins.check = check; builtins.abs = lambda x: 0",
    "leave the check": "def add(a, b): raise SystemExit(0)",
    "end in the call": "import os\ndef add(a, b): os._exit(0)",
    "answer before it is asked": "import os\nfor fd in range(3, 60):\n"
    '    for line in (b\'{"names": ["add"]}\', b\'{"value": 5}\', b\'{"value": 5}\'):\n'
    "        try: os.write(fd, line + b'\\n')\n        except OSError: pass\nos._exit(0)",
    "answer with what cannot be read": "import os\ndef add(a, b):\n    for fd in range(3, 60):\n"
    "        try: os.write(fd, b'[' * 100000 + b'\\n')\n        except OSError: pass",
    "answer without end": "def add(a, b): return 'x' * (9 << 20)",
    "patch the encoder": "import sys\nmain = sys.modules['__main__']\n"
    "main.encoded = lambda value: '{\"E\": [true]}'\ndef add(a, b): return 0",
    "patch the scanner": "import json, sys\njson.loads = lambda *a, **k: {'value': 5}\n"
    "sys.modules['__main__'].parsed = lambda data: {'name': 'add', 'args': [], 'kwargs': {}}\n"
    "def add(*args): return 5",
    "pickle itself as equal": "class E:\n    def __reduce__(self): return eval, ('5',)\n"
    "    __eq__ = lambda s, o: True\ndef add(a, b): return E()",
    "say that it is another class": "class E:\n    __class__ = int\n"
    "    __eq__ = __sub__ = lambda s, o: s\n    __abs__ = lambda s: 0\ndef add(a, b): return E()",
    "a fraction equal to everything": "from fractions import Fraction\nclass E(Fraction):\n"
    "    __eq__ = lambda s, o: True\n    __hash__ = None\n    __sub__ = lambda s, o: 0\n"
    "    __str__ = lambda s: '7'\ndef add(a, b): return E(7)",
    "a text equal to everything": "class E(str):\n    __eq__ = lambda s, o: True\n"
    "    __hash__ = None\n    __sub__ = lambda s, o: 0\ndef add(a, b): return E('x')",
    "not a number": "def add(a, b): return float('nan')",
    "infinite": "def add(a, b): return float('inf')",
    "a generator that looks at who asks": "import sys\ndef add(a, b):\n"
    "    frame = sys._getframe()\n    while frame:\n        if 'wanted' in frame.f_globals:\n"
    "            yield frame.f_globals['wanted'][a, b]\n        frame = frame.f_back\n    yield 0",
    "answers in a thread": "import os, threading\ndef flood():\n    while True:\n"
    "        for fd in range(3, 60):\n            try: os.write(fd, b'{\"value\":5}\\n')\n"
    "            except OSError: pass\n"
    "threading.Thread(target=flood, daemon=True).start()\ndef add(a, b): return 0",
    "an error that says it passed": "def add(a, b): raise AssertionError('passed')",
    "replace what exists": "import builtins, gc\nfor o in gc.get_objects():\n"
    "    if isinstance(o, dict) and 'abs' in o: o['abs'] = lambda x: 0\n"
    "def add(a, b): return 0",
    "wrap what is written": "import posix\nwrite = posix.write\n"
    "posix.write = lambda fd, data: write(fd, data.replace(b'0', b'{}')) and len(data)\n"
    "def add(a, b): return 0",
    "hide in an import": "import sys, types\nfake = types.ModuleType('math')\n"
    "fake.fabs = lambda x: 0\nsys.modules['math'] = fake\nbuiltins = sys.modules['builtins']\n"
    "builtins.__import__ = lambda *a, **k: fake\ndef add(a, b): return 0",
    "right once": "def add(a, b): return 5",
}

# These make the tester work for ever, or for more than it may: neither may pass.
EXHAUSTING = {
    "a power of ten as a fraction": "from fractions import Fraction\nclass E(Fraction):\n"
    "    __str__ = lambda s: '1e999999999'\ndef add(a, b): return E(7)",
    "digits without end": "class E(int):\n    pass\ndef add(a, b): return E(1 << (30 << 20))",
    "nested without end": "def add(a, b):\n    x = []\n    for _ in range(10 ** 6): x = [x]\n"
    "    return x",
    "brackets without end": "import os\ndef add(a, b):\n"
    "    for fd in range(3, 60):\n        try: os.write(fd, b'{\"value\":' + b'[' * 3_000_000)\n"
    "        except OSError: pass\n    return 5",
    "many small answers": "def add(a, b): return [[]] * 2_000_000",
    "an iterator without end": "import itertools\ndef add(a, b): return itertools.count()",
    "never an answer": "import time\ndef add(a, b): time.sleep(1000)",
    "a line without end": "import os\ndef add(a, b):\n    while True:\n"
    "        for fd in range(3, 60):\n            try: os.write(fd, b'x' * 65536)\n"
    "            except OSError: pass",
}

# Right answers, each of which has to pass.
RIGHT = "def add(a, b): return a + b"
HONEST = {
    "plain": RIGHT,
    "an object": "class Adder:\n    def __call__(self, a, b): return a + b\nadd = Adder()",
    "a static method": "class A:\n    add = staticmethod(lambda a, b: a + b)\nadd = A.add",
    "a partial": "import functools\nadd = functools.partial(lambda c, a, b: a + b + c, 0)",
    "a cache": "import functools\n@functools.lru_cache(None)\n" + RIGHT,
    "prints much": "def add(a, b):\n    print('x' * 1_000_000)\n    return a + b",
    "imports": "import collections, functools, heapq, itertools, math, re, string, typing\n"
    + RIGHT,
    "imports more": "import random, hashlib, datetime, decimal, json\nrandom.seed(1)\n" + RIGHT,
    "types": "from typing import Union\nfrom dataclasses import dataclass\n"
    "@dataclass\nclass Pair:\n    a: int\n    b: int\n"
    "def add(a: Union[int, float], b: int) -> int: return sum(vars(Pair(a, b)).values())",
    "is the main program": "if __name__ != '__main__': raise SystemExit\n" + RIGHT,
    "has a demonstration": RIGHT + "\nif __name__ == '__main__':\n    assert add(1, 1) == 2",
    "threads": "from concurrent.futures import ThreadPoolExecutor\ndef add(a, b):\n"
    "    with ThreadPoolExecutor(3) as pool: return sum(pool.map(int, (a, b)))",
    "a file of its own": "import tempfile\ndef add(a, b):\n"
    "    with tempfile.TemporaryFile('w+') as f:\n"
    "        f.write(str(a + b)); f.seek(0); return int(f.read())",
    "coroutines": "import asyncio\nasync def later(a, b):\n    await asyncio.sleep(0)\n"
    "    return a + b\ndef add(a, b): return asyncio.run(later(a, b))",
    "a float": "def add(a, b): return float(a + b)",
    "a fraction": "from fractions import Fraction\ndef add(a, b): return Fraction(a) + b",
    "a decimal": "from decimal import Decimal\ndef add(a, b): return Decimal(a) + b",
    "a complex number": "def add(a, b): return complex(a + b)",
    "a number of a kind": "import enum\nclass N(enum.IntEnum):\n    A = 5\n    B = 41\n"
    "def add(a, b): return N(a + b)",
    "a subclass": "class N(int): pass\ndef add(a, b): return N(a + b)",
    "memory": "x = [0] * (10 ** 7)\n" + RIGHT,
    "a deep recursion": "import sys\nsys.setrecursionlimit(10000)\n"
    "def add(a, b, n=5000): return add(a, b, n - 1) if n else a + b",
    "changes builtins": "import builtins\nbuiltins.abs = None\ndel builtins.sum\n" + RIGHT,
    "catches all": "def add(a, b):\n    try: return a + b\n    except: return 0\n    finally: pass",
    "reads its input": "import sys\nassert sys.stdin.read() == ''\n" + RIGHT,
    "names beyond ASCII": "def add(\u00e4, b):\n    \u03c3 = '\u2211'\n    return \u00e4 + b",
    "tabs and returns": "def add(a, b):\r\n\treturn a + b\r\n",
}
# Those that need threads or files, which only bubblewrap gives.
NEED_NAMESPACES = ("threads", "a file of its own")
