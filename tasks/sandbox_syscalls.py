"""Which system calls a program in the sandbox may not make: a filter as the kernel reads it.

Namespaces do not split all of the kernel: keys of the session, sockets to the hypervisor (vsock
reaches it from an empty network), memory that counts for nobody (`memfd_create`, System V shared
memory), and parts that often had holes, such as io_uring, bpf and userfaultfd. No solution of an
exercise needs them. Nor does one need processes: without them the limit on memory is one for all.

There are two filters. Under bubblewrap, threads are allowed and the namespaces hold what concerns
other processes. A program that has no namespaces around it gets neither threads nor `execve`, may
signal and ask about itself only, and may not change what is said of a file (mode, owner, times,
attributes), which Landlock does not look at.

What is listed fails as forbidden, what the kernel learnt after this list fails as unknown, and the
rest is allowed. Numbers are those of the kernel's tables (arch/x86/entry/syscalls/syscall_64.tbl
and include/uapi/asm-generic/unistd.h). A filter is classic BPF over struct seccomp_data, see
seccomp(2).
"""

import errno
import struct
from collections.abc import Sequence
from typing import TypeAlias

from tasks.base import TaskError

Numbers: TypeAlias = tuple[int, int | None]  # on x86_64 and aarch64; None: there is no such call
Instruction: TypeAlias = tuple[int, int, int, int]  # operation, jump if true, if false, operand

FORBIDDEN: dict[str, Numbers] = {
    # Other processes: their memory, their files, their place.
    **{"ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271)},
    **{"kcmp": (312, 272), "process_madvise": (440, 440), "process_mrelease": (448, 448)},
    **{"pidfd_open": (434, 434), "pidfd_getfd": (438, 438), "pidfd_send_signal": (424, 424)},
    **{"move_pages": (279, 239), "migrate_pages": (256, 238)},
    # Namespaces and mounts: the walls themselves.
    **{"mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51)},
    **{"unshare": (272, 97), "setns": (308, 268), "open_tree": (428, 428)},
    **{"move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431)},
    **{"fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442)},
    # Keys, which are the session's.
    **{"add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219)},
    # Doors into the kernel that have let people in before.
    **{"bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282)},
    **{"vmsplice": (278, 75), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426)},
    **{"io_uring_register": (427, 427), "modify_ldt": (154, None)},
    # Files by handle instead of by path, and being told of what others do to files.
    **{"name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265)},
    **{"inotify_init": (253, None), "inotify_init1": (294, 26), "fanotify_init": (300, 262)},
    # The machine.
    **{"init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106)},
    **{"kexec_load": (246, 104), "kexec_file_load": (320, 294), "reboot": (169, 142)},
    **{"swapon": (167, 224), "swapoff": (168, 225), "syslog": (103, 116), "acct": (163, 89)},
    **{"quotactl": (179, 60), "quotactl_fd": (443, 443)},
    # Memory and messages outside the limits.
    **{"memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194)},
    **{"semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180)},
    # Networks (pairs of AF_UNIX sockets are left), and processes.
    **{"socket": (41, 198), "fork": (57, None), "vfork": (58, None)},
}
FORBIDDEN_ALONE: dict[str, Numbers] = {
    **{"execve": (59, 221), "execveat": (322, 281)},
    # What is said of a file: Landlock asks about its content and its place only.
    **{"chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "chown": (92, None)},
    **{"fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "truncate": (76, 45)},
    **{"utime": (132, None), "utimes": (235, None), "futimesat": (261, None)},
    **{"utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7)},
    **{"removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16)},
    "flock": (73, 32),
    # How others are scheduled.
    **{"sched_setaffinity": (203, 122), "sched_setscheduler": (144, 119)},
    **{"sched_setparam": (142, 118), "sched_setattr": (314, 274), "setpriority": (141, 140)},
    "ioprio_set": (251, 30),
}
# Calls whose first argument is a process, which has to be the caller's number, or 0 for some.
OF_ITSELF: dict[str, Numbers] = {
    **{"kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131)},
    **{"rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240)},
}
OF_ITSELF_OR_0: dict[str, Numbers] = {
    **{"prlimit64": (302, 261), "getpgid": (121, 155), "getsid": (124, 156), "setpgid": (109, 154)},
}
CHECKED: dict[str, Numbers] = {
    **{"clone": (56, 220), "socketpair": (53, 199), "fcntl": (72, 25), "ioctl": (16, 29)},
}
MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}  # audit number, column above
CLONE3 = 435  # its flags lie behind a pointer; C libraries fall back to clone when there is none
FIRST_UNKNOWN = 452  # numbers from here on came after Linux 6.6, the same on all processors

_NEW_NAMESPACES, _THREAD = 0x7E020000, 0x00010000  # flags of clone
_UNIX = 1  # the family of sockets
_SIGNALS_BY_FILE = (8, 10, 15)  # F_SETOWN, F_SETSIG, F_SETOWN_EX: the kernel signals for a program
_SIGNALS_BY_DEVICE = (0x8901, 0x8902, 0x5412)  # FIOSETOWN, SIOCSPGRP; TIOCSTI types for others

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, (16, 24)  # offsets into struct seccomp_data; low halves
_ALLOW, _KILL, _FAIL = 0x7FFF0000, 0x80000000, 0x00050000
_FORBIDDEN, _UNKNOWN = _FAIL | errno.EPERM, _FAIL | errno.ENOSYS


def syscall_filter(machine: str, *, alone: int | None = None) -> bytes:
    """The filter for a processor (`os.uname().machine`).

    `alone` is the number of the process that it is for, when nothing but the filter and Landlock
    keeps that from other processes. Raises TaskError for a processor whose calls are not known.
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
        (_RETURN, 0, 0, _KILL),  # a call by another table of numbers, as 32-bit programs make
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, 1 << 30),  # x32, a third table of x86_64
        (_RETURN, 0, 0, _FORBIDDEN),
        (_AT_LEAST, 0, 1, FIRST_UNKNOWN),
        (_RETURN, 0, 0, _UNKNOWN),
        (_EQUAL, 0, 1, CLONE3),
        (_RETURN, 0, 0, _UNKNOWN),
    ]
    forbidden = [*FORBIDDEN.values(), *(FORBIDDEN_ALONE.values() if alone else [])]
    for number in (numbers[column] for numbers in forbidden):
        if number is not None:
            program += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _FORBIDDEN)]
    clone, pair, fcntl, ioctl = (numbers[column] for numbers in CHECKED.values())
    program += _only(pair, [_UNIX])
    if alone is None:
        program += _if_it_is(
            clone,
            [
                (_LOAD, 0, 0, _ARGUMENTS[0]),
                (_ANY_BIT, 1, 0, _NEW_NAMESPACES),
                (_ANY_BIT, 1, 0, _THREAD),
                (_RETURN, 0, 0, _FORBIDDEN),
                (_RETURN, 0, 0, _ALLOW),
            ],
        )
    else:
        program += _if_it_is(clone, [(_RETURN, 0, 0, _FORBIDDEN)])
        program += _all_but(fcntl, _SIGNALS_BY_FILE) + _all_but(ioctl, _SIGNALS_BY_DEVICE)
        for numbers in OF_ITSELF.values():
            program += _only(numbers[column], [alone])
        for numbers in OF_ITSELF_OR_0.values():
            program += _only(numbers[column], [0, alone])
    program.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def _if_it_is(number: int | None, block: Sequence[Instruction]) -> list[Instruction]:
    """The block, which ends in a return, for one call; `number` is in the accumulator."""
    return [(_EQUAL, 0, len(block), number or 0), *block]


def _only(number: int | None, values: Sequence[int]) -> list[Instruction]:
    """The call is allowed when its first argument is one of `values`."""
    jumps = [(_EQUAL, len(values) - i, 0, value) for i, value in enumerate(values)]
    ends = [(_RETURN, 0, 0, _FORBIDDEN), (_RETURN, 0, 0, _ALLOW)]
    return _if_it_is(number, [(_LOAD, 0, 0, _ARGUMENTS[0]), *jumps, *ends])


def _all_but(number: int | None, values: Sequence[int]) -> list[Instruction]:
    """The call is allowed when its second argument is none of `values`."""
    jumps = [(_EQUAL, len(values) - i, 0, value) for i, value in enumerate(values)]
    ends = [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _FORBIDDEN)]
    return _if_it_is(number, [(_LOAD, 0, 0, _ARGUMENTS[1]), *jumps, *ends])
