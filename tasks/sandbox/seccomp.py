"""The seccomp filter of the sandbox: an allow-list of system calls.

A call that is not listed fails as unknown (ENOSYS), so that C libraries fall back to older calls; a
call whose conditions do not hold fails as forbidden (EPERM). So everything that namespaces and
Landlock do not isolate is unreachable, in future kernels too: System V IPC, message queues, keys,
bpf, io_uring, aio, other processes, sync, mounts.

CPython needs these calls for all of tests/support/tasks/sandbox_corpus.py. Two sets are added under
bubblewrap, where threads are counted per sandbox and files are in its own tmpfs. Without it a
program has neither, and may open files only to read, which Landlock before version 3 does not
ensure (O_TRUNC).

Numbers are those of the kernel's tables (arch/x86/entry/syscalls/syscall_64.tbl and
include/uapi/asm-generic/unistd.h). A filter is classic BPF over struct seccomp_data; see
seccomp(2).
"""

import errno
import functools
import struct
from collections.abc import Sequence
from typing import TypeAlias

from tasks.base import TaskError

Numbers: TypeAlias = tuple[int | None, int | None]  # on x86_64 and aarch64; None: no such call
Instruction: TypeAlias = tuple[int, int, int, int]  # operation, jump if true, if false, operand
Condition: TypeAlias = tuple[int, int, tuple[int, ...]]  # half of an argument, test, its values

ALLOWED: dict[str, Numbers] = {
    # Reading, writing and waiting on what is open.
    **{"read": (0, 63), "write": (1, 64), "readv": (19, 65), "writev": (20, 66)},
    **{"pread64": (17, 67), "pwrite64": (18, 68), "preadv": (295, 69), "pwritev": (296, 70)},
    **{"lseek": (8, 62), "close": (3, 57), "dup": (32, 23), "dup2": (33, None), "dup3": (292, 24)},
    **{"pipe": (22, None), "pipe2": (293, 59), "poll": (7, None), "ppoll": (271, 73)},
    **{"select": (23, None), "pselect6": (270, 72), "epoll_create": (213, None)},
    **{"epoll_create1": (291, 20), "epoll_ctl": (233, 21), "epoll_wait": (232, None)},
    **{"epoll_pwait": (281, 22), "recvfrom": (45, 207), "shutdown": (48, 210)},
    **{"getsockname": (51, 204), "getpeername": (52, 205), "close_range": (436, 436)},
    # Files by name, to read.
    **{"stat": (4, None), "lstat": (6, None), "fstat": (5, 80), "newfstatat": (262, 79)},
    **{"statx": (332, 291), "access": (21, None), "faccessat": (269, 48), "faccessat2": (439, 439)},
    **{"readlink": (89, None), "readlinkat": (267, 78), "getdents": (78, None)},
    **{"getdents64": (217, 61), "getcwd": (79, 17), "chdir": (80, 49), "fchdir": (81, 50)},
    **{"umask": (95, 166)},
    # Memory and time.
    **{"mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215), "mremap": (25, 216)},
    **{"madvise": (28, 233), "brk": (12, 214), "nanosleep": (35, 101)},
    **{"clock_nanosleep": (230, 115), "clock_gettime": (228, 113), "clock_getres": (229, 114)},
    **{"gettimeofday": (96, 169), "time": (201, None), "times": (100, 153), "getitimer": (36, 102)},
    **{"setitimer": (38, 103), "alarm": (37, None)},
    # Signals and locks between threads.
    **{"rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139)},
    **{"rt_sigpending": (127, 136), "rt_sigtimedwait": (128, 137), "rt_sigsuspend": (130, 133)},
    **{"sigaltstack": (131, 132), "pause": (34, None), "restart_syscall": (219, 128)},
    **{"futex": (202, 98), "set_robust_list": (273, 99), "rseq": (334, 293)},
    "sched_yield": (24, 124),
    # What it is and what it has.
    **{"getpid": (39, 172), "getppid": (110, 173), "gettid": (186, 178), "getpgrp": (111, None)},
    **{"getuid": (102, 174), "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177)},
    **{"getresuid": (118, 148), "getresgid": (120, 150), "getgroups": (115, 158)},
    **{"uname": (63, 160), "sysinfo": (99, 179), "getrusage": (98, 165), "getrlimit": (97, 163)},
    **{"setrlimit": (160, 164), "getcpu": (309, 168), "getrandom": (318, 278), "exit": (60, 93)},
    "exit_group": (231, 94),
}
OWN_FILES: dict[str, Numbers] = {
    **{"creat": (85, None), "truncate": (76, 45), "ftruncate": (77, 46), "fallocate": (285, 47)},
    **{"rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276), "mkdir": (83, None)},
    **{"mkdirat": (258, 34), "rmdir": (84, None), "unlink": (87, None), "unlinkat": (263, 35)},
    **{"link": (86, None), "linkat": (265, 37), "symlink": (88, None), "symlinkat": (266, 36)},
    **{"chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "utimensat": (280, 88)},
    **{"statfs": (137, 43), "fstatfs": (138, 44), "fsync": (74, 82), "fdatasync": (75, 83)},
    **{"msync": (26, 227), "sendfile": (40, 71), "copy_file_range": (326, 285)},
    **{"listxattr": (194, 11), "llistxattr": (195, 12), "flistxattr": (196, 13)},
}
CHECKED: dict[str, Numbers] = {
    **{"kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "getpgid": (121, 155)},
    **{"getsid": (124, 156), "prlimit64": (302, 261), "sched_getaffinity": (204, 123)},
    **{"socketpair": (53, 199), "sendto": (44, 206), "fcntl": (72, 25), "ioctl": (16, 29)},
    **{"prctl": (157, 167), "open": (2, None), "openat": (257, 56), "clone": (56, 220)},
}
MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}  # audit number, column above
OWN_NUMBER = 0xDEADBEEF  # placeholder for the process id, which only the process itself knows

_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_NO_BIT = -1  # a test of ours, next to the two operations before it
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16  # offsets into struct seccomp_data
_ALLOW, _KILL, _FAIL = 0x7FFF0000, 0x80000000, 0x00050000
_FORBIDDEN, _UNKNOWN = _FAIL | errno.EPERM, _FAIL | errno.ENOSYS


def _conditions(own_files_and_threads: bool) -> dict[str, tuple[Condition, ...]]:
    """Return the conditions on the arguments of each checked call; () allows any.

    Arguments are 64 bits, tested in 32-bit halves: 2 is the lower half of the second argument.
    """
    itself, itself_or_0 = (0, _EQUAL, (OWN_NUMBER,)), (0, _EQUAL, (0, OWN_NUMBER))
    # The bits of any access mode but O_RDONLY, and of O_CREAT, O_TRUNC, __O_TMPFILE.
    writes = (0o3 | 0o100 | 0o1000 | 0o20000000,)
    conditions: dict[str, tuple[Condition, ...]] = {
        **dict.fromkeys(("kill", "tkill", "tgkill"), (itself,)),
        **dict.fromkeys(("getpgid", "getsid", "prlimit64", "sched_getaffinity"), (itself_or_0,)),
        "socketpair": ((0, _EQUAL, (1,)),),  # AF_UNIX
        "sendto": ((8, _EQUAL, (0,)), (9, _EQUAL, (0,))),  # no address: to a pair's other end
        # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC, F_GETPIPE_SZ.
        "fcntl": ((2, _EQUAL, (0, 1, 2, 3, 4, 1030, 1032)),),
        # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX.
        "ioctl": ((2, _EQUAL, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)),),
        # PR_SET_NAME, PR_GET_NAME, PR_GET_SECCOMP, PR_GET_NO_NEW_PRIVS.
        "prctl": ((0, _EQUAL, (15, 16, 21, 39)),),
        "open": ((2, _NO_BIT, writes),),
        "openat": ((4, _NO_BIT, writes),),
    }
    if own_files_and_threads:
        # No CLONE_NEW* but CLONE_THREAD.
        threads = (0, _NO_BIT, (0x7E020080,)), (0, _ANY_BIT, (0x00010000,))
        conditions |= {"open": (), "openat": (), "clone": threads}
    return conditions


@functools.cache
def syscall_filter(machine: str, *, own_files_and_threads: bool) -> bytes:
    """Return the filter for a processor (`os.uname().machine`), with `OWN_NUMBER` in it.

    Raises TaskError for a processor whose calls are unknown.
    """
    if machine not in MACHINES:
        raise TaskError(
            f"model-written code runs in a sandbox only, and there is none for {machine} "
            f"(only for {', '.join(MACHINES)})"
        )
    audit_number, column = MACHINES[machine]
    program: list[Instruction] = [
        (_LOAD, 0, 0, _ARCH),
        (_EQUAL, 1, 0, audit_number),
        (_RETURN, 0, 0, _KILL),  # a call of another table of numbers, such as 32-bit ones
        (_LOAD, 0, 0, _NUMBER),
    ]
    conditions = _conditions(own_files_and_threads)
    allowed = ALLOWED | (OWN_FILES if own_files_and_threads else {})
    for name, numbers in (allowed | CHECKED).items():
        number = numbers[column]
        if number is not None and (name in allowed or name in conditions):
            program += _allow(number, conditions.get(name, ()))
    program.append((_RETURN, 0, 0, _UNKNOWN))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def _allow(number: int, conditions: Sequence[Condition]) -> list[Instruction]:
    """Return instructions that allow a call if all conditions hold; see `_conditions`."""
    block: list[Instruction] = []
    for half, test, values in conditions:
        block.append((_LOAD, 0, 0, _ARGUMENTS + 4 * half))
        # Jumps are relative: a condition that holds skips the return of _FORBIDDEN.
        if test == _NO_BIT:
            block += [(_ANY_BIT, 0, 1, value) for value in values]
        else:
            block += [(test, len(values) - i, 0, value) for i, value in enumerate(values)]
        block.append((_RETURN, 0, 0, _FORBIDDEN))
    block.append((_RETURN, 0, 0, _ALLOW))
    return [(_EQUAL, 0, len(block), number), *block]
