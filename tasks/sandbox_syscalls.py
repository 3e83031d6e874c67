"""Which system calls a program in the sandbox may not make: a filter as the kernel reads it.

Much of the kernel is not split by namespaces: keys of the session, sockets to the hypervisor (vsock
reaches it from an empty network), and parts that often had holes, such as io_uring, bpf and
userfaultfd. No solution of an exercise needs them. They fail as forbidden; what is not listed is
allowed.

Numbers are those of the kernel's tables (arch/x86/entry/syscalls/syscall_64.tbl and
include/uapi/asm-generic/unistd.h). A filter is classic BPF over struct
seccomp_data, see seccomp(2).
"""

import errno
import struct
from dataclasses import dataclass

from tasks.base import TaskError


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What the kernel calls things on one kind of processor."""

    audit_arch: int
    clone: int
    socket: int
    forbidden: tuple[int, ...]  # in the order of `NAMES`


NAMES = (
    *("ptrace", "process_vm_readv", "process_vm_writev", "kcmp"),
    *("mount", "umount2", "pivot_root", "chroot", "unshare", "setns"),
    *("add_key", "request_key", "keyctl"),
    *("bpf", "perf_event_open", "userfaultfd", "vmsplice"),
    *("name_to_handle_at", "open_by_handle_at"),
    *("init_module", "finit_module", "delete_module", "kexec_load"),
    *("reboot", "swapon", "syslog", "acct", "quotactl"),
)
FORBIDDEN_EVERYWHERE = (  # newer calls have one number on all processors
    *(425, 426, 427),  # io_uring_setup, _enter, _register
    *(428, 429, 430, 431, 432, 433, 442),  # open_tree, move_mount, fs..., mount_setattr
    438,  # pidfd_getfd
)
MACHINES = {
    "x86_64": Machine(
        audit_arch=0xC000003E,
        clone=56,
        socket=41,
        forbidden=(
            *(101, 310, 311, 312),
            *(165, 166, 155, 161, 272, 308),
            *(248, 249, 250),
            *(321, 298, 323, 278),
            *(303, 304),
            *(175, 313, 176, 246),
            *(169, 167, 103, 163, 179),
        ),
    ),
    "aarch64": Machine(
        audit_arch=0xC00000B7,
        clone=220,
        socket=198,
        forbidden=(
            *(117, 270, 271, 272),
            *(40, 39, 41, 51, 97, 268),
            *(217, 218, 219),
            *(280, 241, 282, 75),
            *(264, 265),
            *(105, 273, 106, 104),
            *(142, 224, 116, 89, 60),
        ),
    ),
}
FAMILIES = (1, 2, 10)  # of sockets: AF_UNIX, AF_INET, AF_INET6
NEW_NAMESPACES = 0x7E020000  # flags of clone
CLONE3 = 435  # its flags lie behind a pointer; C libraries fall back to clone when there is none

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCH, _FIRST_ARGUMENT = 0, 4, 16  # offsets into struct seccomp_data
_ALLOW, _KILL, _FAIL = 0x7FFF0000, 0x80000000, 0x00050000


def syscall_filter(machine: str) -> bytes:
    """The filter for a processor (`os.uname().machine`). Raises TaskError for one without."""
    if machine not in MACHINES:
        raise TaskError(
            f"model-written code runs in a sandbox only, and there is none for {machine} "
            f"(only for {', '.join(MACHINES)})"
        )
    names = MACHINES[machine]
    program = [
        (_LOAD, 0, 0, _ARCH),
        (_EQUAL, 1, 0, names.audit_arch),
        (_RETURN, 0, 0, _KILL),  # a call by another table of numbers, as 32-bit programs make
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, 1 << 30),  # x32, a third table of x86_64
        (_RETURN, 0, 0, _FAIL | errno.EPERM),
        (_EQUAL, 0, 1, CLONE3),
        (_RETURN, 0, 0, _FAIL | errno.ENOSYS),
    ]
    for number in (*names.forbidden, *FORBIDDEN_EVERYWHERE):
        program += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _FAIL | errno.EPERM)]
    program += [
        (_EQUAL, 0, 4, names.clone),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_ANY_BIT, 0, 1, NEW_NAMESPACES),
        (_RETURN, 0, 0, _FAIL | errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
        (_EQUAL, 1, 0, names.socket),
        (_RETURN, 0, 0, _ALLOW),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
    ]
    for family in FAMILIES:
        program += [(_EQUAL, 0, 1, family), (_RETURN, 0, 0, _ALLOW)]
    program.append((_RETURN, 0, 0, _FAIL | errno.EAFNOSUPPORT))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
