"""Programs that try things a model's program must not get done, and what has to become of each.

Nothing here does harm where it is let: files are opened, not written, signals are number 0, and
what the kernel is asked to do has arguments that it refuses from anyone. Words in capitals are
replaced by what the test made: a FILE that anyone may write, the TEST's process, a PORT and a
SOCKET that listen, a socket for datagrams at DGRAM, a segment of SHARED memory, SEMAPHORES, a QUEUE
of messages, another queue named NAMED, a MARK to find processes by.
"""

# Each passes if the attempt is refused. Outside the sandbox those marked "control" do not.
REFUSED = """
import ctypes, os, socket
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
ATTEMPTS = {
    "control: open a file of the host": "refused(lambda: open('FILE'))",
    "control: open a file of the host to write": "refused(lambda: os.open('FILE', os.O_RDWR))",
    "control: read passwords": "refused(lambda: open('/etc/passwd'))",
    "control: list processes": "refused(lambda: os.listdir('/proc'))",
    "control: open what lies behind the interpreter": "refused(lambda: open('/proc/self/exe'))",
    "control: list devices": "refused(lambda: os.listdir('/dev'))",
    "control: list the kernel's switches": "refused(lambda: os.listdir('/sys'))",
    "control: signal the test": "refused(lambda: os.kill(TEST, 0))",
    "control: ask for the test's limits": "import resource\n"
    "refused(lambda: resource.prlimit(TEST, resource.RLIMIT_CPU))",
    "control: see the test": "refused(lambda: os.getpgid(TEST))",
    "control: connect to the host": "address = '127.0.0.1', PORT\n"
    "refused(lambda: socket.create_connection(address))",
    "control: connect to a socket without a file": "refused(lambda: "
    "socket.socket(socket.AF_UNIX).connect(chr(0) + 'SOCKET'))",
    "control: read the environment": "assert 'SANDBOX_SECRET' not in os.environ, 'escaped'",
    "control: read the environment of the C library": "libc.getenv.restype = ctypes.c_char_p\n"
    "assert libc.getenv(b'SANDBOX_SECRET') is None, 'escaped'",
    "control: use an open file of the test": "refused(lambda: os.fstat(INHERITED))",
    "control: learn the host's name": "assert os.uname().nodename == 'sandbox', 'escaped'",
    "be root or a real user": "assert os.getuid() == USER, 'escaped'",
    "connect to the world": "refused(lambda: socket.create_connection(('1.1.1.1', 53), 0.5))",
    "send a datagram": "kind = socket.AF_INET, socket.SOCK_DGRAM\n"
    "refused(lambda: socket.socket(*kind).sendto(b'x', ('8.8.8.8', 53)))",
    "open a raw socket": "refused(lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1))",
    "open a packet socket": "refused(lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW))",
    "resolve a name": "refused(lambda: socket.getaddrinfo('localhost.example', 80))",
    "write to /usr": "refused(lambda: open('/usr/lib/x', 'w'))",
    "write to /": "refused(lambda: open('/x', 'w'))",
    "make a folder in /": "refused(lambda: os.mkdir('/x'))",
    "change an interpreter's mode": "refused(lambda: os.chmod('/usr/bin/env', 0o777))",
    "escape by a link": "def follow():\n    os.symlink('/../../etc/passwd', '/tmp/link')\n"
    "    open('/tmp/link')\nrefused(follow)",
    "become root": "refused(lambda: os.setuid(0))",
    "become root by setresuid": "refused(lambda: os.setresuid(0, 0, 0))",
    "take groups": "refused(lambda: os.setgroups([0]))",
    "change root": "refused(lambda: os.chroot('/tmp'))",
    "make a device": "import stat\n"
    "refused(lambda: os.mknod('/tmp/mem', stat.S_IFCHR | 0o666, os.makedev(1, 1)))",
    "mount": "refused(lambda: libc.mount(b'x', b'/tmp', b'tmpfs', 0, None))",
    "mount /proc": "refused(lambda: libc.mount(b'proc', b'/tmp', b'proc', 0, None))",
    "unmount": "refused(lambda: libc.umount2(b'/usr', 2))",
    "make /usr writable": "refused(lambda: libc.mount(None, b'/usr', None, 32 | 4096, None))",
    "a user namespace inside": "refused(lambda: libc.unshare(0x10000000))",
    "user and mount namespaces inside": "refused(lambda: libc.unshare(0x10020000))",
    "a mount namespace inside": "refused(lambda: libc.unshare(0x00020000))",
    "a network namespace inside": "refused(lambda: libc.unshare(0x40000000))",
    "attach to the test": "refused(lambda: libc.ptrace(16, TEST, 0, 0))",
    "attach to the first process": "refused(lambda: libc.ptrace(16, 1, 0, 0))",
    "control: read keys": "refused(lambda: call(250, 219, 0, -3, 1))",
    "control: a process in a namespace of its own": "def clone():\n"
    "    child = call(56, 220, 0x10000000 | 17, 0, 0, 0, 0)\n"
    "    if child == 0: os._exit(0)\n    return child\nrefused(clone)",
    "control: talk to the kernel about devices": "kind = socket.AF_NETLINK, socket.SOCK_RAW\n"
    "refused(lambda: socket.socket(*kind))",
    "talk to the hypervisor": "refused(lambda: socket.socket(socket.AF_VSOCK))",
    "use the kernel's ciphers": "kind = socket.AF_ALG, socket.SOCK_SEQPACKET\n"
    "refused(lambda: socket.socket(*kind))",
    "share a ring with the kernel": "area = ctypes.create_string_buffer(120)\n"
    "refused(lambda: libc.syscall(425, 1, area))",
    "catch faults": "refused(lambda: call(323, 282, 1))",
    "clone by the newer call": "refused(lambda: libc.syscall(435, 0, 0))",
    "change the host's name": "refused(lambda: libc.sethostname(b'x', 1))",
    "set the clock": "import time\nrefused(lambda: time.clock_settime(time.CLOCK_REALTIME, 1))",
    "raise a limit": "import resource\n"
    "refused(lambda: resource.setrlimit(resource.RLIMIT_AS, (-1, -1)), ValueError, OSError)",
    "be more important": "refused(lambda: os.nice(-5))",
    "read the kernel's log": "refused(lambda: libc.klogctl(3, ctypes.create_string_buffer(9), 9))",
    "run a program as root": "command = ['su', '-c', 'true']\n"
    "refused(lambda: os.posix_spawn('/usr/bin/su', command, {}))",
    "take 2 GB": "refused(lambda: bytearray(2 << 30), MemoryError)",
    "take memory bit by bit": "def fill():\n    kept = []\n    while True:\n"
    "        kept.append(bytearray(16 << 20))\nrefused(fill, MemoryError)",
    "map 2 GB": "import mmap\nrefused(lambda: mmap.mmap(-1, 2 << 30))",
    "write a big file": "refused(lambda: open('/tmp/big', 'wb').write(bytes(32 << 20)))",
    "fill /tmp": "def fill():\n    for i in range(9):\n"
    "        open('/tmp/%d' % i, 'wb').write(bytes(8 << 20))\nrefused(fill)",
    "open many files": "refused(lambda: [os.pipe() for _ in range(100)])",
    "start many threads": "import threading, time\ndef start():\n    for _ in range(50):\n"
    "        threading.Thread(target=time.sleep, args=(9,), daemon=True).start()\n"
    "refused(start, RuntimeError)",
    "control: start a process": "def start():\n    if os.fork() == 0: os._exit(0)\n"
    "    os.wait()\nrefused(start)",
    "control: start a process by the library": "import subprocess\n"
    "refused(lambda: subprocess.run(['/usr/bin/true']))",
    "control: start a process by posix_spawn": "path = '/usr/bin/true'\n"
    "refused(lambda: os.posix_spawn(path, ['true'], {}))",
    "control: start a shell": "assert os.system('true') != 0, 'escaped'",
    "leave a grandchild": "def start():\n    if os.fork() == 0:\n        os.setsid()\n"
    "        if os.fork() == 0:\n            os.execv('/usr/bin/sleep', ['sleep', 'MARK'])\n"
    "        os._exit(0)\nrefused(start)",
    "control: open passwords by a folder's number": "root = os.open('/', os.O_PATH)\n"
    "refused(lambda: os.open('etc/passwd', os.O_RDONLY, dir_fd=root))",
    "control: link to a file of the host": "refused(lambda: os.link('FILE', 'FILE.link'))",
    "control: open a file of the host by a folder's number": "refused(lambda: "
    "os.open(os.path.basename('FILE'), 0, dir_fd=os.open(os.path.dirname('FILE'), os.O_PATH)))",
    "control: look at a home": "refused(lambda: os.listdir('HOME'))",
    "control: make a file without a name": "refused(lambda: os.open('/var/tmp', os.O_TMPFILE | 2))",
    "control: make one in shared memory": "refused(lambda: os.open('/dev/shm', os.O_TMPFILE | 2))",
    "control: change times of a file of the host": "refused(lambda: os.utime('FILE', (1, 1)))",
    "control: change the mode of a file of the host": "refused(lambda: os.chmod('FILE', 0o666))",
    "read shadow passwords": "refused(lambda: open('/etc/shadow'))",
    "read the machine's memory": "refused(lambda: open('/dev/mem', 'rb'))",
    "open the container's socket": "import socket\n"
    "refused(lambda: socket.socket(socket.AF_UNIX).connect('/run/docker.sock'))",
    "open another process's memory": "refused(lambda: open('/proc/TEST/mem', 'rb'))",
    "open its own parent's files": "refused(lambda: os.listdir('/proc/%d/fd' % os.getppid()))",
    "write to the kernel's switches": "path = '/proc/sys/kernel/core_pattern'\n"
    "refused(lambda: os.open(path, os.O_WRONLY))",
    "hold only pipes": "import stat\nfor fd in range(64):\n    try: mode = os.fstat(fd).st_mode\n"
    "    except OSError: continue\n    assert stat.S_ISFIFO(mode), 'escaped'",
    "open the terminal": "refused(lambda: open('/dev/tty'))",
    "open terminals": "refused(lambda: os.open('/dev/ptmx', os.O_RDWR))",
    "type for others": "import fcntl\nfor fd in (0, 1, 2):\n"
    "    refused(lambda: fcntl.ioctl(fd, 0x5412, b'x'))",
    "ask for a new root by pivoting": "refused(lambda: call(155, 41, b'/', b'/tmp'))",
    "mount by the newer calls": "for n in (428, 429, 430, 431, 432, 433, 442):\n"
    "    refused(lambda: libc.syscall(n, -1, b'', 0, 0, 0))",
    "join a namespace of the test": "path = '/proc/TEST/ns/net'\n"
    "refused(lambda: libc.setns(os.open(path, 0), 0))",
    "control: unshare files": "refused(lambda: libc.unshare(0x400))",
    "namespaces of times, groups and messages": "for flag in (0x80, 0x02000000, 0x08000000):\n"
    "    refused(lambda: libc.unshare(flag))",
    "control: a handle of the test": "refused(lambda: libc.syscall(434, TEST, 0))",
    "read the test's memory": "class V(ctypes.Structure): _fields_ = [('a', ctypes.c_void_p), "
    "('n', ctypes.c_size_t)]\nv = V(ctypes.addressof(ctypes.create_string_buffer(8)), 8)\n"
    "refused(lambda: call(310, 270, TEST, ctypes.byref(v), 1, ctypes.byref(v), 1, 0))",
    "seize the test": "refused(lambda: libc.ptrace(0x4206, TEST, 0, 0))",
    "be traced": "refused(lambda: libc.ptrace(0, 0, 0, 0))",
    "control: compare with the test": "refused(lambda: call(312, 272, TEST, TEST, 0, 0, 0))",
    "control: signal a group": "refused(lambda: os.killpg(os.getpgid(TEST), 0))",
    "control: signal a thread of the test": "refused(lambda: call(234, 131, TEST, TEST, 0))",
    "control: have the test scheduled": "own = os.sched_getaffinity(0)\n"
    "refused(lambda: os.sched_setaffinity(TEST, own))",
    "control: have the kernel signal the test": "import fcntl\na, b = os.pipe()\n"
    "refused(lambda: fcntl.fcntl(a, fcntl.F_SETOWN, TEST))",
    "control: get memory as a file": "refused(lambda: call(319, 279, b'x', 0))",
    "control: get shared memory": "def get():\n    n = call(29, 194, 0, 4096, 0o1600)\n"
    "    libc.shmctl(n, 0, None)\n    return n\nrefused(get)",
    "control: get semaphores": "def get():\n    n = call(64, 190, 0, 1, 0o1600)\n"
    "    libc.semctl(n, 0, 0)\n    return n\nrefused(get)",
    "control: get a queue of messages": "def get():\n    n = call(68, 186, 0, 0o1600)\n"
    "    libc.msgctl(n, 0, None)\n    return n\nrefused(get)",
    "control: write to the test's shared memory": "libc.shmat.restype = ctypes.c_ssize_t\n"
    "def write():\n    at = libc.shmat(SHARED, None, 0)\n    if at != -1:\n"
    "        ctypes.memmove(at, b'overwritten', 11)\n    return at\nrefused(write)",
    "control: ask about the test's shared memory": "refused(lambda: "
    "libc.shmctl(SHARED, 2, ctypes.create_string_buffer(256)))",
    "detach shared memory": "refused(lambda: call(67, 197, 0))",
    "control: raise the test's semaphore": "one = (ctypes.c_short * 3)(0, 1, 0o4000)\n"
    "refused(lambda: libc.semop(SEMAPHORES, one, 1))",
    "control: raise it with a time limit": "one = (ctypes.c_short * 3)(0, 1, 0o4000)\n"
    "refused(lambda: libc.semtimedop(SEMAPHORES, one, 1, None))",
    "control: read the test's semaphore": "refused(lambda: libc.semctl(SEMAPHORES, 0, 12))",
    "control: send to the test's queue": "message = (ctypes.c_long * 2)(1, 0)\n"
    "refused(lambda: libc.msgsnd(QUEUE, message, 8, 0o4000))",
    "control: receive from the test's queue": "message = (ctypes.c_long * 9)(1, 0)\n"
    "refused(lambda: libc.msgrcv(QUEUE, message, 64, 1, 0o14000))",
    "control: ask about the test's queue": "refused(lambda: "
    "libc.msgctl(QUEUE, 2, ctypes.create_string_buffer(256)))",
    "control: open the test's queue by name": "refused(lambda: "
    "call(240, 180, b'NAMED', 0, 0, None))",
    "control: remove the test's queue by name": "refused(lambda: call(241, 181, b'NAMED'))",
    "send to and receive from queues by number": "for n in ((242, 182), (243, 183), (244, 184), "
    "(245, 185)):\n    refused(lambda: call(*n, -1, None, 0, 0, None))",
    "control: connect a pair to a socket of the host": "refused(lambda: send("
    "socket.socket.connect))",
    "control: send a datagram to a socket of the host": "refused(lambda: send("
    "lambda s, to: s.sendto(b'x', to)))",
    "control: send a message to a socket of the host": "refused(lambda: send("
    "lambda s, to: s.sendmsg([b'x'], [], 0, to)))",
    "control: send several messages to a socket of the host": "import struct\n"
    "def several(s, to):\n"
    "    name = struct.pack('=H108s', 1, to.encode())\n"
    "    kept = ctypes.create_string_buffer(name, len(name))\n"
    "    head = (ctypes.c_uint64 * 8)(ctypes.addressof(kept), len(name))\n"
    "    if call(307, 269, s.fileno(), ctypes.byref(head), 1, 0) == -1: raise OSError\n"
    "refused(lambda: send(several))",
    "control: hand a pipe to a socket of the host": "import array\ndef hand(s, to):\n"
    "    end = array.array('i', [os.pipe()[0]])\n"
    "    s.sendmsg([b'x'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, end)], 0, to)\n"
    "refused(lambda: send(hand))",
    "control: hand a pipe to itself": "import array\ndef hand():\n"
    "    a, b = socket.socketpair()\n    end = array.array('i', [os.pipe()[0]])\n"
    "    a.sendmsg([b'x'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, end)])\nrefused(hand)",
    "control: give a pair's end a name": "refused(lambda: send("
    "lambda s, to: s.bind(chr(0) + 'SOCKET-%d' % os.getpid())))",
    "control: outlive the test": "refused(lambda: libc.prctl(1, 0, 0, 0, 0))",
    "control: take contexts of the kernel's input and output": "taken = ctypes.c_ulong(0)\n"
    "refused(lambda: call(206, 0, 1, ctypes.byref(taken)))",
    "write all disks": "refused(lambda: call(162, 81))",
    "write one disk": "root = os.open('/usr', os.O_RDONLY)\n"
    "refused(lambda: call(306, 267, -1) if root < 0 else call(306, 267, root))",
    "open a file by the newer call": "how = (ctypes.c_uint64 * 3)(0o1000, 0, 0)\n"
    "refused(lambda: libc.syscall(437, -100, b'/usr', how, 24))",
    "control: lock a file of the host": "import fcntl\n"
    "def lock():\n    with open('/usr/bin/env', 'rb') as f: fcntl.lockf(f, fcntl.LOCK_SH)\n"
    "refused(lock)",
    "control: take a big pipe": "import fcntl\na, b = os.pipe()\n"
    "refused(lambda: fcntl.fcntl(a, 1031, 1 << 20))",
    "control: change what programs may expect of the machine": "refused(lambda: "
    "libc.personality(0x20000 | libc.personality(0xffffffff)))",
    "lock memory": "refused(lambda: libc.mlockall(3))",
    "take huge pages": "import mmap\nrefused(lambda: mmap.mmap(-1, 1 << 30, flags=0x40022))",
    "take memory without a reserve": "import mmap\n"
    "refused(lambda: mmap.mmap(-1, 64 << 30, flags=0x4022))",
    "load a program of the kernel": "area = ctypes.create_string_buffer(120)\n"
    "refused(lambda: call(321, 280, 5, area, 120))",
    "count events of the machine": "area = ctypes.create_string_buffer(b'\\0\\0\\0\\0p', 120)\n"
    "refused(lambda: call(298, 241, area, 0, -1, -1, 0))",
    "enter a ring": "refused(lambda: libc.syscall(426, -1, 0, 0, 0, 0))",
    "control: add a key": "refused(lambda: call(248, 217, b'user', b'x', b'y', 1, -1))",
    "ask for a key": "refused(lambda: call(249, 218, b'user', b'x', None, -1))",
    "control: watch files": "refused(lambda: call(294, 26, 0))",
    "watch all files": "refused(lambda: call(300, 262, 0, 0))",
    "open by handle": "refused(lambda: call(304, 265, -100, None, 0))",
    "control: a socket of the internet": "refused(lambda: socket.socket())",
    "control: a socket of datagrams": "refused(lambda: socket.socket(type=socket.SOCK_DGRAM))",
    "connect by the next version": "refused(lambda: socket.create_connection(('::1', 53), 0.5))",
    "a pair of sockets of other kinds": "for family in (2, 10, 16, 17, 30, 38, 40):\n"
    "    refused(lambda: socket.socketpair(family), OSError, ValueError)",
    "listen": "refused(lambda: socket.create_server(('127.0.0.1', 0)))",
    "ask for what the kernel learnt late": "refused(lambda: libc.syscall(462, 0, 0, 0))",
    "become a group": "refused(lambda: os.setgid(0))",
    "become root for files": "libc.setfsuid(0)\nassert libc.setfsuid(-1) != 0, 'escaped'",
    "take rights": "head = (ctypes.c_uint32 * 2)(0x20080522, 0)\n"
    "data = (ctypes.c_uint32 * 6)(*[0xffffffff] * 6)\nrefused(lambda: call(126, 91, head, data))",
    "have rights that are passed on": "refused(lambda: libc.prctl(47, 2, 0, 0, 0))",
    "take the filter off": "assert libc.prctl(21, 0, 0, 0, 0) == 2, 'escaped'",
    "let rights be given again": "libc.prctl(38, 0, 0, 0, 0)\n"
    "assert libc.prctl(39, 0, 0, 0, 0) == 1, 'escaped'",
    "load a module of the kernel": "refused(lambda: call(175, 105, None, 0, b''))",
    "count what users store": "refused(lambda: call(179, 60, 0, None, 0, None))",
    "account for processes": "refused(lambda: libc.acct(None))",
    "one long file after another": "def write():\n    for i in range(64):\n"
    "        with open('/tmp/%d' % (i % 4), 'ab') as f: f.write(bytes(1 << 20))\nrefused(write)",
    "a file with a hole": "def write():\n    with open('/tmp/hole', 'wb') as f:\n"
    "        f.truncate(1 << 40)\nrefused(write)",
    "a limit on cores": "import resource\n"
    "assert resource.getrlimit(resource.RLIMIT_CORE) == (0, 0), 'escaped'",
}
# What is let by a sandbox without namespaces, where it tells little: what the machine is called,
# and /proc's link to the interpreter, which is in reach anyway.
LET_WITHOUT_NAMESPACES = (
    "control: learn the host's name",
    "control: open what lies behind the interpreter",
)

# Each must end as not passed, with a reason that holds the text beside it.
ENDED = {
    "loop for ever": ("while True: pass", "timed out"),
    "sleep for ever": ("import time; time.sleep(1000)", "timed out"),
    "wait for input": ("input()", "EOFError"),
    "ignore signals": (
        "import signal\nfor s in (1, 2, 3, 14, 15, 24): signal.signal(s, signal.SIG_IGN)\n"
        "while True: pass",
        "timed out",
    ),
    "print for ever": ("while True: print('x' * 10000)", "printed more than 8 MiB"),
    "fork for ever": (
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        "timed out",
    ),
    "kill itself": ("import os; os.kill(os.getpid(), 9)", "the program ended"),
    "kill the first process": (
        "import os\nfor s in range(1, 65):\n    try: os.kill(1, s)\n    except OSError: pass\n"
        "while True: pass",
        "timed out",
    ),
    "recurse for ever": ("def f(): f()\nf()", "RecursionError"),
    "crash": ("import ctypes; ctypes.string_at(0)", "the program ended"),
    "no program": ("def f(:", "SyntaxError"),
    "a zero byte": ("x = 1\0", "null byte"),
    "a 32-bit call": (
        "import ctypes, mmap\nm = mmap.mmap(-1, 4096, prot=7)\n"
        "m.write(b'\\xb8\\x14\\0\\0\\0\\xcd\\x80\\xc3')\n"
        "f = ctypes.addressof(ctypes.c_char.from_buffer(m))\nctypes.CFUNCTYPE(int)(f)()",
        "the program ended",
    ),
    "become another program": ("import os; os.execv('/usr/bin/su', ['su', '-c', 'true'])", ""),
    "stop itself": ("import os; os.kill(os.getpid(), 19)", "timed out"),
    "a bomb with a fuse": (
        "import threading, time\ndef bomb():\n    time.sleep(0.1)\n    kept = []\n"
        "    while True: kept.append(bytearray(1 << 20))\n"
        "try: threading.Thread(target=bomb).start()\nexcept RuntimeError: pass\n"
        "time.sleep(9)",
        "timed out",
    ),
    "threads without end": (
        "import threading\ndef f():\n    while True:\n"
        "        try: threading.Thread(target=f).start()\n        except RuntimeError: pass\nf()",
        "timed out",
    ),
    "folders without end": (
        "import os\nwhile True:\n    try:\n        os.mkdir('/tmp/d')\n"
        "        os.chdir('/tmp/d')\n        os.rename('/tmp/d', 'd')\n    except OSError: pass",
        "timed out",
    ),
    "files without end": (
        "i = 0\nwhile True:\n    i += 1\n    try: open('/tmp/%d' % i, 'w').close()\n"
        "    except OSError: pass",
        "timed out",
    ),
    "one sum without end": ("x = 9 ** 9 ** 9", "timed out"),
    "a pattern without end": ("import re; re.match('(a+)+$', 'a' * 60 + 'b')", "timed out"),
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
    "ask for its time back": (
        "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (1, 1))\nwhile True: pass",
        "timed out",
    ),
    "wait for a lock": (
        "import threading\nl = threading.Lock(); l.acquire(); l.acquire()",
        "timed out",
    ),
    "wait for a pipe": ("import os\na, b = os.pipe(); os.read(a, 1)", "timed out"),
    "an error whose text is an error": (
        "class E(Exception):\n    def __str__(self): raise self\nraise E",
        "RuntimeError: E",
    ),
}
