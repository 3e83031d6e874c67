"""Restrict this process before it runs a program: Landlock, seccomp.

Runs inside the sandbox's interpreter; passed to it like child.py, so it imports nothing of ours.
Each step succeeds or raises OSError.

    parent    the process dies with the thread that started it             (PR_SET_PDEATHSIG)
    rights    executed files grant no privileges                           (PR_SET_NO_NEW_PRIVS)
    files     only the listed ones are readable, none are writable         (Landlock, Linux 5.13)
    calls     only those of an allow-list                                  (seccomp)

Bubblewrap has already hidden the files. With Landlock alone, a program can still see which files
exist and the host's name, but write no file.
"""

import ctypes
import posix
import select
import struct

_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_SECCOMP_FILTER = 2
_SIGKILL = 9
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # on all processors
_ASK_VERSION = 1
_BENEATH = 1  # the type of a rule for a file, or a folder and everything below it
_READ_FILE, _READ_FOLDER = 1 << 2, 1 << 3
# Number of file rights by version: 13, then also moving between folders, truncating, ioctl. A
# right that a ruleset does not handle is not restricted.
_NUM_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
_TCP = 3  # binding and connecting
_SCOPES = 3  # abstract sockets, and signals


def landlock_version():
    """Return the version of Landlock that this kernel has, 0 for none."""
    libc = ctypes.CDLL(None, use_errno=True)
    return max(libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _ASK_VERSION), 0)


def confine(order, life):
    """Apply all restrictions of the module's docstring to this process.

    `life` is a pipe whose other end the parent holds while it lives; `order` has

    landlock  its version to use, 0 for none
    readable  the files and folders that stay readable
    filter    the filter of system calls, in hexadecimal
    own       the placeholder for this process's id in the filter, in hexadecimal
    """
    libc = ctypes.CDLL(None, use_errno=True)

    def must(result):
        if result < 0:
            number = ctypes.get_errno()
            raise OSError(number, posix.strerror(number))
        return result

    must(libc.prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0))
    # The parent may have died before the request. Bubblewrap starts this process only after
    # requesting its own death signal.
    parent = select.poll()
    parent.register(life, 0)
    if parent.poll(0):
        posix._exit(1)
    must(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    if order["landlock"]:
        _landlock(libc, must, order["landlock"], order["readable"])
    own = posix.getpid().to_bytes(4, "little")
    code = bytes.fromhex(order["filter"]).replace(bytes.fromhex(order["own"]), own)
    # The buffer must stay referenced until prctl has copied it: the struct has only its address.
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("@HP", len(code) // 8, ctypes.addressof(buffer))
    must(libc.prctl(_PR_SET_SECCOMP, _SECCOMP_FILTER, program, 0, 0))


def _landlock(libc, must, version, readable):
    rights = (1 << _NUM_RIGHTS.get(version, 16)) - 1
    rules = (rights, _TCP if version >= 4 else 0, _SCOPES if version >= 6 else 0)
    # Only the fields that this version knows: the kernel refuses others (E2BIG).
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = must(
        libc.syscall(_CREATE_RULESET, struct.pack("=QQQ", *rules), ctypes.c_size_t(size), 0)
    )
    for path in readable:
        place = posix.open(path, posix.O_PATH | posix.O_CLOEXEC)
        folder = posix.fstat(place).st_mode & 0o170000 == 0o040000
        rule = struct.pack("=Qi", _READ_FILE | (_READ_FOLDER if folder else 0), place)
        must(libc.syscall(_ADD_RULE, ruleset, _BENEATH, rule, 0))
        posix.close(place)
    must(libc.syscall(_RESTRICT_SELF, ruleset, 0))
    posix.close(ruleset)
