"""Programs that try to escape. test_sandbox.py runs each of them in every kind of sandbox and
checks what it has done.

Each finds its targets in variables (see `Targets`), and prints ESCAPED where it believes that it
succeeded. `REAL` are those that do succeed, and harm nobody, where nothing confines them: a test
holds that against them, because an attack that never works proves nothing about a wall.
"""

from __future__ import annotations

from dataclasses import dataclass

HELPERS = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):  # numbers of x86-64
    words = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    result = libc.syscall(ctypes.c_long(number), *words)
    print("ESCAPED" if result >= 0 else f"refused {ctypes.get_errno()}", number)
    return result
def tried(deed):
    try:
        print("ESCAPED", deed())
    except OSError as error:
        print("refused", error.errno)
"""


@dataclass(frozen=True)
class Targets:
    canary: str
    """A file with a secret."""
    folder: str
    """Where it lies; the user may write there."""
    repository: str
    tcp: int
    udp: int
    """Ports on 127.0.0.1 that somebody listens to."""
    unix: str
    """A socket in the file system."""
    parent: int
    """The process of the trainer."""

    def program(self, attack: str) -> str:
        return "\n".join(
            [*(f"{name} = {value!r}" for name, value in vars(self).items()), HELPERS, attack]
        )


READING = {
    "open": "tried(lambda: open(canary).read())",
    "open from elsewhere": "tried(lambda: open('../' * 20 + canary.lstrip('/')).read())",
    "open by libc": "fd = libc.open(canary.encode(), 0)\nb = ctypes.create_string_buffer(99)\n"
    "libc.read(fd, b, 99)\nprint('ESCAPED' if b.value else 'refused', b.value)",
    "symlink": "def deed():\n  os.symlink(canary, link := f'/tmp/link-{os.getpid()}')\n  try: "
    "return open(link).read()\n"
    "  finally: os.unlink(link)\ntried(deed)",
    "hard link": "def deed():\n  os.link(canary, '/tmp/hard')\n  return "
    "open('/tmp/hard').read()\ntried(deed)",
    "rename into reach": "def deed():\n  os.rename(canary, '/tmp/moved')\n  return "
    "open('/tmp/moved').read()\ntried(deed)",
    "list its folder": "tried(lambda: os.listdir(folder))",
    "fchdir": "def deed():\n  os.fchdir(os.open(folder, os.O_PATH))\n  return "
    "open(os.path.basename(canary)).read()\ntried(deed)",
    "/proc/self/root": "tried(lambda: open('/proc/self/root' + canary).read())",
    "/proc/PARENT/root": "tried(lambda: open(f'/proc/{parent}/root{canary}').read())",
    "/proc/PARENT/cwd": "tried(lambda: os.listdir(f'/proc/{parent}/cwd'))",
    "/proc/PARENT/environ": "tried(lambda: open(f'/proc/{parent}/environ').read())",
    "/proc/PARENT/fd": "tried(lambda: os.listdir(f'/proc/{parent}/fd'))",
    "/proc/PARENT/mem": "tried(lambda: open(f'/proc/{parent}/mem', 'rb').read(1))",
    "all that /proc has": "for base, _, files in os.walk('/proc'):\n  for f in files[:40]:\n"
    "    try: print(open(f'{base}/{f}').read(500))\n    except (OSError, ValueError): pass",
    "environment": "print(os.environ, libc.getenv(b'WANDB_API_KEY'))",
    "the stack above": "f = sys._getframe()\nwhile f:\n  print(repr(f.f_locals).replace('ESC', "
    "''))\n  f = f.f_back",
    "inherited descriptors": "for fd in range(3, 300):\n  try: print(os.pread(fd, 200, 0))\n  "
    "except OSError: pass",
    "write into inherited descriptors": "for fd in range(3, 300):\n  try: os.write(fd, b'x'); "
    "print('ESCAPED')\n"
    "  except OSError: pass",
    "its own input": "print(os.read(0, 100))",
    "/etc/shadow": "tried(lambda: open('/etc/shadow').read())",
    "the home": "tried(lambda: os.listdir(os.path.expanduser('~root')))",
    "the repository": "tried(lambda: open(repository + '/pyproject.toml').read())",
    "its memory": "class V(ctypes.Structure): _fields_ = [('a', ctypes.c_void_p), ('n', "
    "ctypes.c_size_t)]\n"
    "b = ctypes.create_string_buffer(8)\nv, w = V(ctypes.addressof(b), 8), V(0x400000, 8)\n"
    "call(310, parent, ctypes.byref(v), 1, ctypes.byref(w), 1, 0)",
    "ptrace": "call(101, 16, parent, 0, 0)",
    "file handles": "b = ctypes.create_string_buffer(200)\nm = ctypes.c_int()\nb[0] = 128\n"
    "call(303, -100, canary.encode(), b, ctypes.byref(m), 0)",
}
"""What the canary's file, the environment and other processes hold must not come out."""

WRITING = {
    "append to the canary": "tried(lambda: open(canary, 'a').write('eaten'))",
    "truncate": "tried(lambda: os.truncate(canary, 0))",
    "unlink": "tried(lambda: os.unlink(canary))",
    "chmod": "tried(lambda: os.chmod(canary, 0))",
    "chown": "tried(lambda: os.chown(canary, 1, 1))",
    "utime": "tried(lambda: os.utime(canary, (1, 1)))",
    "setxattr": "tried(lambda: os.setxattr(canary, 'user.eaten', b'x'))",
    "a new file beside it": "tried(lambda: open(folder + '/new', 'w'))",
    "a device": "tried(lambda: os.mknod('/tmp/disk', 0o60600, os.makedev(8, 0)))",
    "the repository's source": "tried(lambda: open(repository + '/src/agent_r1/core.py', 'a'))",
    "a file into the packages": "tried(lambda: open(sys.path[-1] + '/sitecustomize.py', 'w'))",
    "a file into Python": "tried(lambda: open(os.path.dirname(os.__file__) + '/eaten.py', 'w'))",
    "the interpreter": "tried(lambda: open(sys.executable, 'r+b'))",
    "the home": "tried(lambda: open(os.path.expanduser('~root/.profile'), 'a'))",
    "/": "tried(lambda: open('/eaten', 'w'))",
    "/dev/shm": "tried(lambda: open('/dev/shm/eaten', 'w'))",
    "the kernel's settings": "tried(lambda: open('/proc/sys/kernel/core_pattern', 'w'))",
}

PROCESSES = {
    "fork": "tried(lambda: os.fork() or os._exit(0))",
    "fork bomb": "while True:\n  try: os.fork()\n  except OSError: break\nprint('refused')",
    "fork by libc": "pid = libc.fork()\nif pid == 0: os._exit(0)\nprint('ESCAPED' if pid > 0 else "
    "'refused')",
    "clone3": "call(435, ctypes.create_string_buffer(88), 88)",
    "a shell": "import subprocess\ntried(lambda: subprocess.check_output('id', shell=True))",
    "os.system": "print('ESCAPED' if os.system('true') == 0 else 'refused')",
    "posix_spawn": "tried(lambda: os.posix_spawn(sys.executable, ['python', '-c', ''], {}))",
    "exec": "tried(lambda: os.execv(sys.executable, ['python', '-c', 'print(\"ESCAPED\")']))",
    "multiprocessing": "import multiprocessing\ntried(lambda: "
    "multiprocessing.get_context('fork').Process(target=print).start())",
    "threads": "import threading\ntry:\n  while True: threading.Thread(target=lambda: "
    "None).start(); print('ESCAPED')\n"
    "except RuntimeError: print('refused')",
    "kill the parent": "tried(lambda: os.kill(parent, 9))",
    "kill everybody": "tried(lambda: os.kill(-1, 9))",
    "kill the group": "tried(lambda: os.killpg(0, 9))",
    "a descriptor of the parent": "call(434, parent, 0)",
    "a file that signals the parent": "import fcntl\nr, w = os.pipe()\ndef deed():\n  "
    "fcntl.fcntl(r, 8, parent)\n"
    "  fcntl.fcntl(r, 10, 9)\n  fcntl.fcntl(r, 4, os.O_ASYNC)\n  os.write(w, b'x')\ntried(deed)",
    "queue a signal": "call(129, parent, 9, ctypes.create_string_buffer(128))",
    "limits of the parent": "call(302, parent, 7, (ctypes.c_long * 2)(3, 3), None)",
    "priority of the parent": "tried(lambda: os.setpriority(0, parent, 19))",
    "cores of the parent": "tried(lambda: os.sched_setaffinity(parent, {0}))",
    "outlive the parent": "call(157, 1, 0, 0, 0, 0)",
    "another session": "tried(lambda: os.setsid())",
    "the terminal": "import fcntl\ntried(lambda: fcntl.ioctl(0, 0x5412, b'x'))",
    "root": "tried(lambda: os.setuid(0))",
}

KERNEL = {
    "mount": "call(165, b'none', b'/tmp', b'tmpfs', 0, None)",
    "unshare": "call(272, 0x10000000)",
    "setns": "call(308, 0, 0)",
    "chroot": "tried(lambda: os.chroot('/tmp'))",
    "io_uring": "call(425, 8, ctypes.create_string_buffer(200))",
    "bpf": "call(321, 5, ctypes.create_string_buffer(120), 120)",
    "perf": "call(298, ctypes.create_string_buffer(128), 0, -1, -1, 0)",
    "keyring": "call(250, 0, -3, 1)",
    "userfaultfd": "call(323, 1)",
    "another seccomp filter": "call(317, 1, 0, None)",
    "a socket by x32's number": "call(0x40000000 + 41, 2, 1, 0)",
    "a socket by i386's number": "import mmap\nm = mmap.mmap(-1, 4096, prot=7)\n"
    "m.write(b'\\xb8\\x67\\x01\\x00\\x00\\x53\\xbb\\x02\\x00\\x00\\x00\\xb9\\x01\\x00\\x00\\x00\\x31\\xd2\\xcd\\x80\\x5b\\xc3')\n"
    "fd = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(m)))()\n"
    "print('ESCAPED' if fd >= 0 else 'refused')",
}
"""Doors of the kernel that no program needs."""

NETWORK = {
    "TCP": "import socket\ntried(lambda: socket.create_connection(('127.0.0.1', tcp), "
    "2).send(b'out'))",
    "UDP": "import socket\ntried(lambda: socket.socket(2, 2).sendto(b'out', ('127.0.0.1', udp)))",
    "listen": "import socket\ntried(lambda: socket.create_server(('127.0.0.1', 0)))",
    "a Unix socket": "import socket\ndef deed():\n  s = socket.socket(1, 1)\n  s.connect(unix)\n  "
    "s.send(b'out')\ntried(deed)",
    "an abstract socket": "import socket\ntried(lambda: socket.socket(1, 1).bind('\\0canary'))",
    "a pair of sockets": "import socket\ntried(lambda: socket.socketpair(1, 2)[0].sendto(b'out', "
    "unix))",
    "raw packets": "import socket\ntried(lambda: socket.socket(17, 3, 3))",
    "netlink": "import socket\ntried(lambda: socket.socket(16, 3, 0))",
    "DNS": "import socket\ntried(lambda: socket.getaddrinfo('example.org', 80))",
    "HTTP": "import urllib.request\ntried(lambda: "
    "urllib.request.urlopen(f'http://127.0.0.1:{tcp}/', timeout=2).read())",
}

BOMBS = {
    "memory": "b = []\nwhile True: b.append(bytes(1 << 24))",
    "one large object": "print(len(bytes(1 << 40)))",
    "shared memory": "import mmap\nm = []\nwhile True:\n  m.append(mmap.mmap(-1, 1 << 26)); "
    "m[-1].write(b'x' * (1 << 26))",
    "memory in a file": "fd = call(319, b'bomb', 0)\nwhile fd >= 0: os.write(fd, bytes(1 << 20))",
    "System V's memory": "call(29, 0, 1 << 30, 0o1600)",
    "pipes": "held = []\nwhile True: held.append(os.pipe())",
    "recursion": "def f(): return f()\nf()",
    "recursion in C": "sys.setrecursionlimit(10**9)\nx = ()\nfor _ in range(10**6): x = "
    "(x,)\nhash(x)",
    "disk": "with open('/tmp/big', 'wb') as f:\n  for _ in range(1000): f.write(bytes(1 << "
    "20))\nprint('ESCAPED')",
    "disk, in many files": "for i in range(1000):\n  open(f'/tmp/{i}', 'wb').write(bytes(1 << "
    "20))\nprint('ESCAPED')",
    "output": "while True: print('x' * 1000)",
    "output on the error stream": "while True: os.write(2, b'y' * 1000)",
    "an unclosed line": "while True: os.write(1, bytes(1000))",
    "abort": "os.abort()",
    "a null pointer": "ctypes.string_at(0)",
}

TIME = {
    "a large number": "print(len(str(9 ** 9 ** 9)))",
    "a loop": "while True: pass",
    "sleep": "import time\ntime.sleep(1000)",
    "a silent loop": "os.close(0); os.close(1); os.close(2)\nwhile True: pass",
    "deaf to signals": "import signal, time\nfor n in range(1, 32):\n  try: signal.signal(n, "
    "signal.SIG_IGN)\n"
    "  except (OSError, ValueError): pass\ntime.sleep(1000)",
    "a regular expression": "import re\nre.match('(a+)+$', 'a' * 60 + 'b')",
    "a finaliser": "class C:\n  def __del__(self):\n    while True: pass\nc = C()\ndel c",
}

ATTACKS = {
    f"{kind}: {name}": code
    for kind, group in {
        "read": READING,
        "write": WRITING,
        "process": PROCESSES,
        "kernel": KERNEL,
        "network": NETWORK,
        "bomb": BOMBS,
        "time": TIME,
    }.items()
    for name, code in group.items()
}

REAL = [
    "read: open",
    "read: open from elsewhere",
    "read: open by libc",
    "read: symlink",
    "read: list its folder",
    "read: fchdir",
    "read: /proc/self/root",
    "read: /proc/PARENT/root",
    "read: /proc/PARENT/cwd",
    "read: /proc/PARENT/environ",
    "read: /proc/PARENT/fd",
    "read: the repository",
    "write: append to the canary",
    "write: chmod",
    "write: a new file beside it",
    "process: fork",
    "process: fork by libc",
    "process: a shell",
    "process: os.system",
    "process: exec",
    "network: TCP",
    "network: UDP",
    "network: listen",
    "network: a Unix socket",
    "network: an abstract socket",
]
