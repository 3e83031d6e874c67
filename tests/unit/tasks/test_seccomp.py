"""The filter of system calls, as bytes and as a table."""

import re
import struct
from pathlib import Path

import pytest

from tasks.base import TaskError
from tasks.sandbox import seccomp
from tasks.sandbox.seccomp import CHECKED, OWN_NUMBER, syscall_filter


def test_a_processor_whose_calls_are_not_known_has_no_filter():
    with pytest.raises(TaskError, match=r"there is none for riscv64 \(only for x86_64, aarch64\)"):
        syscall_filter("riscv64", own_files_and_threads=False)


def test_the_filter_names_its_calls_as_the_kernels_headers_do():
    headers = ("/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "/usr/include/asm-generic/unistd.h")
    if not all(Path(header).exists() for header in headers):
        pytest.skip("no headers of the kernel (Debian: apt-get install linux-libc-dev)")
    for column, header in enumerate(headers):
        text = Path(header).read_text()
        defined = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", text))
        for name, older in re.findall(r"#define __NR_(\w+) __NR3264_(\w+)", text):
            if older in defined:
                defined.setdefault(name, defined[older])
        for table in (seccomp.ALLOWED, seccomp.OWN_FILES, CHECKED):
            for name, numbers in table.items():
                assert numbers[column] == (int(defined[name]) if name in defined else None), name


@pytest.mark.parametrize("machine", seccomp.MACHINES)
@pytest.mark.parametrize("namespaces", [True, False])
def test_a_filter_is_whole_instructions_and_names_its_process_where_it_has_to(machine, namespaces):
    code = syscall_filter(machine, own_files_and_threads=namespaces)
    operands = [operand for _, _, _, operand in struct.iter_unpack("=HBBI", code)]
    assert len(operands) < 4096  # the kernel's limit
    assert operands.count(OWN_NUMBER) == code.count(OWN_NUMBER.to_bytes(4, "little")) == 7
