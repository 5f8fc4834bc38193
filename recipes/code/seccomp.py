"""List the system calls of model-written programs.

Out: a seccomp filter (classic BPF) for `sandbox_child.py`.
"""

from __future__ import annotations

import functools
import platform
import struct

from agent_r1 import AgentR1Error, extra

_NAMES = """
read write readv writev pread64 pwrite64 preadv pwritev lseek open openat creat close close_range
dup dup2 dup3 pipe pipe2 stat fstat lstat newfstatat statx access faccessat faccessat2 readlink
readlinkat getdents getdents64 getcwd chdir fchdir statfs fstatfs rename renameat renameat2 mkdir
mkdirat rmdir unlink unlinkat link linkat symlink symlinkat truncate ftruncate fallocate fsync
fdatasync umask copy_file_range sendfile mmap munmap mprotect mremap madvise msync mincore brk poll
ppoll select pselect6 epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait eventfd2 futex
restart_syscall sched_yield sched_getaffinity set_robust_list rseq membarrier rt_sigaction
rt_sigprocmask rt_sigreturn sigaltstack nanosleep clock_nanosleep clock_gettime clock_getres
gettimeofday time times getitimer setitimer alarm getpid getppid gettid getuid geteuid getgid
getegid uname sysinfo getrusage getrandom getcpu arch_prctl exit exit_group
"""
SYSTEM_CALLS = _NAMES.split()
"""Not among them: chmod, chown, utime and setxattr, of which Landlock knows nothing; memfd_create,
whose pages no limit counts."""
SYSTEM_CALL_COMMANDS = {
    "fcntl": (0, 1, 2, 3, 4, 5, 6, 7, 1030),
    "ioctl": (0x5401, 0x5413, 0x541B, 0x5450, 0x5451),
}
"""Second arguments. fcntl without F_SETOWN and F_SETSIG, with which a file signals any process."""
ARCHITECTURES = {"x86_64": ("x86_64", 0xC000003E), "aarch64": ("arm64", 0xC00000B7)}
"""`uname -m`: the name in `system_calls`, and the kernel's AUDIT_ARCH number."""


LOAD, EQUAL, LARGER, GIVE = 0x20, 0x15, 0x35, 0x06
"""Codes of classic BPF: load a word of the call, compare (=, >=), end with a verdict."""
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050001, 0x80000000
"""Verdicts. A refused call fails with EPERM."""
NUMBER_AT, ARCHITECTURE_AT = 0, 4
"""Places of words in the kernel's `seccomp_data`."""


def instruction(code: int, k: int, then: int = 0, otherwise: int = 0) -> bytes:
    """Return one instruction: eight bytes. `then` and `otherwise` are instructions to skip."""
    return struct.pack("HBBI", code, then, otherwise, k)


def call_numbers() -> tuple[int, dict[str, int]]:
    """Return this machine's AUDIT_ARCH number, and the numbers of its system calls.

    Raises AgentR1Error on an architecture without numbers.
    """
    with extra("code", "the sandbox"):
        from system_calls import syscalls
    if platform.machine() not in ARCHITECTURES:
        raise AgentR1Error(
            f"no list of system calls for {platform.machine()}", code="unsupported_machine"
        )
    name, audit = ARCHITECTURES[platform.machine()]
    return audit, syscalls().load_arch_table(name)


def check_architecture(audit: int) -> list[bytes]:
    """Return the beginning of each program: another architecture is killed, the number loaded."""
    return [
        instruction(LOAD, ARCHITECTURE_AT),
        instruction(EQUAL, audit, 1),
        instruction(GIVE, KILL),
        instruction(LOAD, NUMBER_AT),
    ]


@functools.cache
def seccomp_filter() -> bytes:
    """Return the seccomp program: in classic BPF, eight bytes an instruction.

    Whatever is not allowed fails with EPERM. x86's second and third set of numbers (x32, i386)
    allow nothing. Raises AgentR1Error on an architecture without numbers.
    """
    audit, numbers = call_numbers()
    program = check_architecture(audit)
    for call in SYSTEM_CALLS:
        if call in numbers:  # the newer architecture has no open, only openat
            program += [instruction(EQUAL, numbers[call], 0, 1), instruction(GIVE, ALLOW)]
    for call, commands in SYSTEM_CALL_COMMANDS.items():
        program += [
            instruction(EQUAL, numbers[call], 0, 2 + 2 * len(commands)),
            instruction(LOAD, 24),  # the second argument's low half
        ]
        for command in commands:
            program += [instruction(EQUAL, command, 0, 1), instruction(GIVE, ALLOW)]
        program.append(instruction(GIVE, REFUSE))
    return b"".join([*program, instruction(GIVE, REFUSE)])
