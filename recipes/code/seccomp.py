"""List the system calls of model-written programs, and those that a shell may not make.

Out: seccomp filters (classic BPF) for `sandbox_child.py` and for bubblewrap. A program may make the
calls of one list only; a shell and what it starts may make all but those of the other.
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
_REFUSED_NAMES = """
mount umount2 pivot_root chroot ptrace bpf perf_event_open keyctl add_key request_key unshare setns
userfaultfd io_uring_setup io_uring_enter io_uring_register kexec_load kexec_file_load init_module
finit_module delete_module open_by_handle_at name_to_handle_at process_vm_readv process_vm_writev
quotactl swapon swapoff reboot acct settimeofday clock_settime adjtimex clock_adjtime syslog
move_pages mbind migrate_pages fsopen fsconfig fsmount fspick move_mount open_tree mount_setattr
memfd_secret pidfd_getfd kcmp lookup_dcookie nfsservctl vhangup iopl ioperm
memfd_create shmget msgget semget
"""
REFUSED_CALLS = _REFUSED_NAMES.split()
"""System calls that a shell and its programs do not need. Those of the last line make memory that
belongs to no process, so that no limit counts it."""
NEW_NAMESPACES = 0x7E020000
"""All flags of clone(2) that make a namespace. In a new one a program would have all rights."""
SOCKET_FAMILIES = (1, 2, 10)
"""AF_UNIX, AF_INET, AF_INET6. Another one may not be in the namespace."""
ARCHITECTURES = {"x86_64": ("x86_64", 0xC000003E), "aarch64": ("arm64", 0xC00000B7)}
"""`uname -m`: the name in `system_calls`, and the kernel's AUDIT_ARCH number."""


LOAD, EQUAL, LARGER, ANY_BIT, GIVE = 0x20, 0x15, 0x35, 0x45, 0x06
"""Codes of classic BPF: load a word of the call, compare (=, >=, &), end with a verdict."""
ALLOW, REFUSE, UNKNOWN, KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
"""Verdicts. A refused call fails with EPERM, an unknown one with ENOSYS."""
NUMBER_AT, ARCHITECTURE_AT, FIRST_ARGUMENT_AT = 0, 4, 16
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


@functools.cache
def shell_filter() -> bytes:
    """Return the program for shells: allow all but `REFUSED_CALLS` and new namespaces.

    Raises AgentR1Error on an architecture without numbers.
    """
    audit, numbers = call_numbers()
    refuse = instruction(GIVE, REFUSE)
    program = check_architecture(audit)
    program += [instruction(LARGER, 0x40000000, 0, 1), refuse]  # x32
    for call in REFUSED_CALLS:
        if call in numbers:
            program += [instruction(EQUAL, numbers[call], 0, 1), refuse]
    # clone3 has its flags in memory, which a filter cannot read. The C library then uses clone.
    program += [instruction(EQUAL, numbers["clone3"], 0, 1), instruction(GIVE, UNKNOWN)]
    program += [
        instruction(EQUAL, numbers["clone"], 0, 3),
        instruction(LOAD, FIRST_ARGUMENT_AT),
        instruction(ANY_BIT, NEW_NAMESPACES, 0, 1),
        refuse,
        instruction(LOAD, NUMBER_AT),
    ]
    families = [
        instruction(EQUAL, family, len(SOCKET_FAMILIES) - number)
        for number, family in enumerate(SOCKET_FAMILIES)
    ]
    program += [
        instruction(EQUAL, numbers["socket"], 0, 2 + len(families)),
        instruction(LOAD, FIRST_ARGUMENT_AT),
        *families,
        refuse,
    ]
    return b"".join([*program, instruction(GIVE, ALLOW)])
