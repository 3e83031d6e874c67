"""Programs that try things a model's program must not get done, and what has to become of each.

Nothing here does harm where it is let: files are opened, not written, signals are number 0, and
what the kernel is asked to do has arguments that it refuses from anyone. Words in capitals are
replaced by what the test made: a FILE that anyone may write, the TEST's process, a PORT and a
SOCKET that listen, a socket for datagrams at DGRAM, a segment of SHARED memory, SEMAPHORES, a QUEUE
of messages, another queue named NAMED, a MARK to find processes by.
"""

# Each attempt passes if it is refused.
REFUSED = """
import array, ctypes, fcntl, mmap, os, resource, socket, stat, struct, time
libc = ctypes.CDLL(None, use_errno=True)
arm = os.uname().machine == 'aarch64'
def refused(attempt, *kinds):
    try:
        result = attempt()
    except (kinds or OSError):
        return
    assert result == -1, "escaped"
def call(x86, arm64, *arguments):
    return libc.syscall(arm64 if arm else x86, *arguments)
def send(call):
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    call(a, 'DGRAM')
"""
# Calls that the filter does not know, and their numbers on x86_64 and aarch64. Without the filter
# the kernel answers something else to arguments that are all -1, and does nothing.
_UNKNOWN = {
    # Users, rights, roots and mounts.
    **{"setuid": (105, 146), "setgid": (106, 144), "setresuid": (117, 147), "chroot": (161, 51)},
    **{"setgroups": (116, 159), "setfsuid": (122, 151), "capset": (126, 91), "mknodat": (259, 33)},
    **{"mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "open_tree": (428, 428)},
    **{"move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431)},
    **{"fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442)},
    # Namespaces and other processes.
    **{"unshare": (272, 97), "setns": (308, 268), "clone3": (435, 435), "ptrace": (101, 117)},
    **{"process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272)},
    **{"pidfd_open": (434, 434), "personality": (135, 92)},
    # The machine: its name, clock, log, modules, events, disks, quotas.
    **{"sethostname": (170, 161), "clock_settime": (227, 112), "syslog": (103, 116)},
    **{"init_module": (175, 105), "bpf": (321, 280), "perf_event_open": (298, 241)},
    **{"sync": (162, 81), "syncfs": (306, 267), "acct": (163, 89), "quotactl": (179, 60)},
    # Ways around calls that are checked, and what is shared by all: rings, memory, keys, queues.
    **{"openat2": (437, 437), "open_by_handle_at": (304, 265), "io_uring_setup": (425, 425)},
    **{"io_uring_enter": (426, 426), "userfaultfd": (323, 282), "mlockall": (151, 230)},
    **{"fanotify_init": (300, 262), "inotify_init1": (294, 26), "shmdt": (67, 197)},
    **{"add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219)},
    **{"memfd_create": (319, 279), "io_setup": (206, 0)},
    **{"mq_timedsend": (242, 182), "mq_timedreceive": (243, 183), "mq_notify": (244, 184)},
    **{"mq_getsetattr": (245, 185), "socket": (41, 198), "mseal": (462, 462)},
}
# Calls that must be refused, and programs that check it themselves. Outside the sandbox those
# marked "control" are let.
_TRIED = {
    "control: open a file of the host": "open('FILE')",
    "control: open a file of the host to write": "os.open('FILE', os.O_RDWR)",
    "control: read passwords": "open('/etc/passwd')",
    "control: list processes": "os.listdir('/proc')",
    "control: open what lies behind the interpreter": "open('/proc/self/exe')",
    "control: list devices": "os.listdir('/dev')",
    "control: list the kernel's switches": "os.listdir('/sys')",
    "control: signal the test": "os.kill(TEST, 0)",
    "control: ask for the test's limits": "resource.prlimit(TEST, resource.RLIMIT_CPU)",
    "control: see the test": "os.getpgid(TEST)",
    "control: connect to the host": "address = '127.0.0.1', PORT\n"
    "refused(lambda: socket.create_connection(address))",
    "control: connect to a socket without a file": "socket.socket(socket.AF_UNIX)"
    ".connect(chr(0) + 'SOCKET')",
    "control: read the environment": "assert 'SANDBOX_SECRET' not in os.environ, 'escaped'",
    "control: read the environment of the C library": "libc.getenv.restype = ctypes.c_char_p\n"
    "assert libc.getenv(b'SANDBOX_SECRET') is None, 'escaped'",
    "control: use an open file of the test": "os.fstat(INHERITED)",
    "control: learn the host's name": "assert os.uname().nodename == 'sandbox', 'escaped'",
    "be root or a real user": "assert os.getuid() == USER, 'escaped'",
    "connect to the world": "socket.create_connection(('1.1.1.1', 53), 0.5)",
    "resolve a name": "socket.getaddrinfo('localhost.example', 80)",
    "write to /usr": "open('/usr/lib/x', 'w')",
    "write to /": "open('/x', 'w')",
    "make a folder in /": "os.mkdir('/x')",
    "change an interpreter's mode": "os.chmod('/usr/bin/env', 0o777)",
    "escape by a link": "def follow():\n    os.symlink('/../../etc/passwd', '/tmp/link')\n"
    "    open('/tmp/link')\nrefused(follow)",
    "control: a process in a namespace of its own": "def clone():\n"
    "    child = call(56, 220, 0x10000000 | 17, 0, 0, 0, 0)\n    if child == 0: os._exit(0)\n"
    "    return child\nrefused(clone)",
    "control: talk to the kernel about devices": "kind = socket.AF_NETLINK, socket.SOCK_RAW\n"
    "refused(lambda: socket.socket(*kind))",
    "raise a limit": "resource.setrlimit(resource.RLIMIT_AS, (-1, -1)), ValueError, OSError",
    "be more important": "os.nice(-5)",
    "run a program as root": "command = ['su', '-c', 'true']\n"
    "refused(lambda: os.posix_spawn('/usr/bin/su', command, {}))",
    "take 2 GB": "bytearray(2 << 30), MemoryError",
    "take memory bit by bit": "def fill():\n    kept = []\n    while True:\n"
    "        kept.append(bytearray(16 << 20))\nrefused(fill, MemoryError)",
    "map 2 GB": "mmap.mmap(-1, 2 << 30)",
    "write a big file": "open('/tmp/big', 'wb').write(bytes(32 << 20))",
    "fill /tmp": "def fill():\n    for i in range(9):\n"
    "        open('/tmp/%d' % i, 'wb').write(bytes(8 << 20))\nrefused(fill)",
    "open many files": "[os.pipe() for _ in range(100)]",
    "start many threads": "import threading\ndef start():\n    for _ in range(50):\n"
    "        threading.Thread(target=time.sleep, args=(9,), daemon=True).start()\n"
    "refused(start, RuntimeError)",
    "control: start a process": "def start():\n    if os.fork() == 0: os._exit(0)\n    os.wait()\n"
    "refused(start)",
    "control: start a process by the library": "import subprocess\n"
    "refused(lambda: subprocess.run(['/usr/bin/true']))",
    "control: start a shell": "assert os.system('true') != 0, 'escaped'",
    "leave a grandchild": "def start():\n    if os.fork() == 0:\n        os.setsid()\n"
    "        if os.fork() == 0:\n            os.execv('/usr/bin/sleep', ['sleep', 'MARK'])\n"
    "        os._exit(0)\nrefused(start)",
    "control: open passwords by a folder's number": "root = os.open('/', os.O_PATH)\n"
    "refused(lambda: os.open('etc/passwd', os.O_RDONLY, dir_fd=root))",
    "control: link to a file of the host": "os.link('FILE', 'FILE.link')",
    "control: open a file of the host by a folder's number": "name = os.path.basename('FILE')\n"
    "refused(lambda: os.open(name, 0, dir_fd=os.open(os.path.dirname('FILE'), os.O_PATH)))",
    "control: look at a home": "os.listdir('HOME')",
    "control: make a file without a name": "os.open('/var/tmp', os.O_TMPFILE | 2)",
    "control: make one in shared memory": "os.open('/dev/shm', os.O_TMPFILE | 2)",
    "control: change times of a file of the host": "os.utime('FILE', (1, 1))",
    "control: change the mode of a file of the host": "os.chmod('FILE', 0o666)",
    "read shadow passwords": "open('/etc/shadow')",
    "read the machine's memory": "open('/dev/mem', 'rb')",
    "open the container's socket": "socket.socket(socket.AF_UNIX).connect('/run/docker.sock')",
    "open another process's memory": "open('/proc/TEST/mem', 'rb')",
    "open its own parent's files": "os.listdir('/proc/%d/fd' % os.getppid())",
    "write to the kernel's switches": "path = '/proc/sys/kernel/core_pattern'\n"
    "refused(lambda: os.open(path, os.O_WRONLY))",
    "hold only pipes": "for fd in range(64):\n    try: mode = os.fstat(fd).st_mode\n"
    "    except OSError: continue\n    assert stat.S_ISFIFO(mode), 'escaped'",
    "open the terminal": "open('/dev/tty')",
    "open terminals": "os.open('/dev/ptmx', os.O_RDWR)",
    "type for others": "for fd in (0, 1, 2):\n    refused(lambda: fcntl.ioctl(fd, 0x5412, b'x'))",
    "control: signal a group": "os.killpg(os.getpgid(TEST), 0)",
    "control: signal a thread of the test": "call(234, 131, TEST, TEST, 0)",
    "control: have the test scheduled": "own = os.sched_getaffinity(0)\n"
    "refused(lambda: os.sched_setaffinity(TEST, own))",
    "control: have the kernel signal the test": "a, b = os.pipe()\n"
    "refused(lambda: fcntl.fcntl(a, fcntl.F_SETOWN, TEST))",
    "control: get shared memory": "def get():\n    n = call(29, 194, 0, 4096, 0o1600)\n"
    "    libc.shmctl(n, 0, None)\n    return n\nrefused(get)",
    "control: get semaphores": "def get():\n    n = call(64, 190, 0, 1, 0o1600)\n"
    "    libc.semctl(n, 0, 0)\n    return n\nrefused(get)",
    "control: get a queue of messages": "def get():\n    n = call(68, 186, 0, 0o1600)\n"
    "    libc.msgctl(n, 0, None)\n    return n\nrefused(get)",
    "control: write to the test's shared memory": "libc.shmat.restype = ctypes.c_ssize_t\n"
    "def write():\n    at = libc.shmat(SHARED, None, 0)\n    if at != -1:\n"
    "        ctypes.memmove(at, b'overwritten', 11)\n    return at\nrefused(write)",
    "control: ask about the test's shared memory": "libc.shmctl(SHARED, 2, "
    "ctypes.create_string_buffer(256))",
    "control: raise the test's semaphore": "one = (ctypes.c_short * 3)(0, 1, 0o4000)\n"
    "refused(lambda: libc.semop(SEMAPHORES, one, 1))",
    "control: raise it with a time limit": "one = (ctypes.c_short * 3)(0, 1, 0o4000)\n"
    "refused(lambda: libc.semtimedop(SEMAPHORES, one, 1, None))",
    "control: read the test's semaphore": "libc.semctl(SEMAPHORES, 0, 12)",
    "control: send to the test's queue": "message = (ctypes.c_long * 2)(1, 0)\n"
    "refused(lambda: libc.msgsnd(QUEUE, message, 8, 0o4000))",
    "control: receive from the test's queue": "message = (ctypes.c_long * 9)(1, 0)\n"
    "refused(lambda: libc.msgrcv(QUEUE, message, 64, 1, 0o14000))",
    "control: ask about the test's queue": "libc.msgctl(QUEUE, 2, "
    "ctypes.create_string_buffer(256))",
    "control: open the test's queue by name": "call(240, 180, b'NAMED', 0, 0, None)",
    "control: remove the test's queue by name": "call(241, 181, b'NAMED')",
    "control: connect a pair to a socket of the host": "send(socket.socket.connect)",
    "control: send a datagram to a socket of the host": "send(lambda s, to: s.sendto(b'x', to))",
    "control: send a message to a socket of the host": "send(lambda s, to: s.sendmsg([b'x'], "
    "[], 0, to))",
    "control: send several messages to a socket of the host": "def several(s, to):\n"
    "    name = struct.pack('=H108s', 1, to.encode())\n"
    "    kept = ctypes.create_string_buffer(name, len(name))\n"
    "    head = (ctypes.c_uint64 * 8)(ctypes.addressof(kept), len(name))\n"
    "    if call(307, 269, s.fileno(), ctypes.byref(head), 1, 0) == -1: raise OSError\n"
    "refused(lambda: send(several))",
    "control: hand a pipe to a socket of the host": "def hand(s, to):\n"
    "    end = array.array('i', [os.pipe()[0]])\n"
    "    s.sendmsg([b'x'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, end)], 0, to)\n"
    "refused(lambda: send(hand))",
    "control: hand a pipe to itself": "def hand():\n    a, b = socket.socketpair()\n"
    "    end = array.array('i', [os.pipe()[0]])\n"
    "    a.sendmsg([b'x'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, end)])\nrefused(hand)",
    "control: give a pair's end a name": "send(lambda s, to: s.bind(chr(0) + 'SOCKET-%d' % "
    "os.getpid()))",
    "control: outlive the test": "libc.prctl(1, 0, 0, 0, 0)",
    "control: lock a file of the host": "def lock():\n"
    "    with open('/usr/bin/env', 'rb') as f: fcntl.lockf(f, fcntl.LOCK_SH)\nrefused(lock)",
    "control: take a big pipe": "a, b = os.pipe()\nrefused(lambda: fcntl.fcntl(a, 1031, 1 << 20))",
    "take huge pages": "mmap.mmap(-1, 1 << 30, flags=0x40022)",
    "take memory without a reserve": "mmap.mmap(-1, 64 << 30, flags=0x4022)",
    "control: a socket of the internet": "socket.socket()",
    "control: a socket of datagrams": "socket.socket(type=socket.SOCK_DGRAM)",
    "a pair of sockets of other kinds": "for family in (2, 10, 16, 17, 30, 38, 40):\n"
    "    refused(lambda: socket.socketpair(family), OSError, ValueError)",
    "have rights that are passed on": "libc.prctl(47, 2, 0, 0, 0)",
    "take the filter off": "assert libc.prctl(21, 0, 0, 0, 0) == 2, 'escaped'",
    "let rights be given again": "libc.prctl(38, 0, 0, 0, 0)\n"
    "assert libc.prctl(39, 0, 0, 0, 0) == 1, 'escaped'",
    "one long file after another": "def write():\n    for i in range(64):\n"
    "        with open('/tmp/%d' % (i % 4), 'ab') as f: f.write(bytes(1 << 20))\nrefused(write)",
    "a file with a hole": "def write():\n    with open('/tmp/hole', 'wb') as f:\n"
    "        f.truncate(1 << 40)\nrefused(write)",
    "a limit on cores": "assert resource.getrlimit(resource.RLIMIT_CORE) == (0, 0), 'escaped'",
    "make a call that no program needs": f"for name, numbers in {_UNKNOWN}.items():\n"
    "    assert call(*numbers, *[-1] * 6) == -1, name\n"
    "    assert ctypes.get_errno() == 38, 'escaped: ' + name",  # ENOSYS: by the filter
    "make a call by the numbers of another table": "refused(lambda: libc.syscall((1 << 30) + 39))",
}
ATTEMPTS = {
    name: code
    if "\n" in code or code.startswith(("assert", "refused("))
    else f"refused(lambda: {code})"
    for name, code in _TRIED.items()
}
# What is let by a sandbox without namespaces, where it tells little: what the machine is called,
# and /proc's link to the interpreter, which is in reach anyway.
LET_WITHOUT_NAMESPACES = (
    "control: learn the host's name",
    "control: open what lies behind the interpreter",
)

# Each must end as not passed, with a reason that holds the text next to it, or "timed out".
_ENDED = {
    "wait for input": ("input()", "EOFError"),
    "ignore signals": "import signal\n"
    "for s in (1, 2, 3, 14, 15, 24): signal.signal(s, signal.SIG_IGN)\nwhile True: pass",
    "print for ever": ("while True: print('x' * 10000)", "printed more than 8 MiB"),
    "fork for ever": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "kill itself": ("import os; os.kill(os.getpid(), 9)", "the program ended"),
    "kill the first process": "import os\nfor s in range(1, 65):\n    try: os.kill(1, s)\n"
    "    except OSError: pass\nwhile True: pass",
    "recurse for ever": ("def f(): f()\nf()", "RecursionError"),
    "crash": ("import ctypes; ctypes.string_at(0)", "the program ended"),
    "no program": ("def f(:", "SyntaxError"),
    "a zero byte": ("x = 1\x00", "null byte"),
    "a 32-bit call": (
        "import ctypes, mmap\nm = mmap.mmap(-1, 4096, prot=7)\n"
        "m.write(b'\\xb8\\x14\\0\\0\\0\\xcd\\x80\\xc3')\n"
        "f = ctypes.addressof(ctypes.c_char.from_buffer(m))\nctypes.CFUNCTYPE(int)(f)()",
        "the program ended",
    ),
    "become another program": ("import os; os.execv('/usr/bin/su', ['su', '-c', 'true'])", ""),
    "stop itself": "import os; os.kill(os.getpid(), 19)",
    "a bomb with a fuse": "import threading, time\ndef bomb():\n    time.sleep(0.1)\n"
    "    kept = []\n    while True: kept.append(bytearray(1 << 20))\n"
    "try: threading.Thread(target=bomb).start()\nexcept RuntimeError: pass\ntime.sleep(9)",
    "threads without end": "import threading\ndef f():\n    while True:\n"
    "        try: threading.Thread(target=f).start()\n        except RuntimeError: pass\nf()",
    "files without end": "i = 0\nwhile True:\n    i += 1\n"
    "    try: open('/tmp/%d' % i, 'w').close()\n    except OSError: pass",
    "a pattern without end": "import re; re.match('(a+)+$', 'a' * 60 + 'b')",
    "a line without end": ("x = '(' * 500_000; eval(x)", "SyntaxError"),
    "write to a closed output": (
        "import os\nos.close(1); os.close(2)\nprint(1, flush=True)",
        "OSError",
    ),
    "print bytes that are no text": (
        "import os\nwhile True: os.write(2, b'\\xff\\x1b[2J' * 9999)",
        "printed more than 8 MiB",
    ),
    "end with a signal of its own": ("import os; os.abort()", "the program ended"),
    "ask for its time back": "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (1, 1))\n"
    "while True: pass",
    "wait for a lock": "import threading\nl = threading.Lock(); l.acquire(); l.acquire()",
    "an error whose text is an error": (
        "class E(Exception):\n    def __str__(self): raise self\nraise E",
        "RuntimeError: E",
    ),
}
ENDED = {
    name: (program, "timed out") if isinstance(program, str) else program
    for name, program in _ENDED.items()
}
