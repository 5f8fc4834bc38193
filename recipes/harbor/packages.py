"""Decide whether the packages that a task installs are here already.

In: a command of a Dockerfile, or a test script. Out: nothing, or the exception `Refused` with the
reason in one line. Installers have stand-ins in the sandbox that do nothing (`container.py`), so
what they would install must be here.
"""

from __future__ import annotations

import importlib.metadata
import re
import shlex
import shutil

NOT_NEEDED = {
    "tmux", "asciinema", "ca-certificates", "curl", "wget", "locales", "tzdata", "apt-utils",
    "software-properties-common", "gnupg", "sudo", "less", "vim", "nano", "procps",
}  # fmt: skip
"""Debian packages that serve other harnesses, the network, or a person at a terminal."""
COMMANDS = {
    "build-essential": "gcc", "python3-pip": "python3", "python3-venv": "python3",
    "python3-dev": "python3", "python-is-python3": "python3", "coreutils": "ls", "gawk": "awk",
    "findutils": "find", "diffutils": "diff", "util-linux": "mount", "openssl": "openssl",
    "openssh-client": "ssh", "xz-utils": "xz", "netcat-openbsd": "nc",
}  # fmt: skip
"""The command of a Debian package, where its name is another one."""
RUNNERS = {"pytest", "pytest-json-ctrf", "uv", "pip", "setuptools", "wheel"}
"""Python packages that only run tests; ours stand in, whatever version is asked for."""
USER_CHANGERS = {
    "useradd", "adduser", "usermod", "groupadd", "addgroup", "su", "runuser", "gosu", "setpriv",
}  # fmt: skip
"""Commands for a second user, which a sandbox without rights does not have."""
SECOND_USER = re.compile(
    rf"(?:^|[;&|(`]|\b(?:sudo|then|do|else|exec)\s)\s*(?:{'|'.join(sorted(USER_CHANGERS))})\s"
    r"|\bsudo\s+(?:-\S+\s+)*-u\s",
    re.MULTILINE,
)
SECOND_USER_IN_PYTHON = re.compile(
    r"\buser\s*=\s*['\"](?:nobody|daemon|www-data)['\"]"  # codespell:ignore
    r"|\bset(?:res|re|e)?uid\s*\("
)
"""Users of a plain image.

Other ones need `useradd`, which is refused; `user="x"` alone may be that of a data base.
"""
FETCHERS = {"curl", "wget", "npm", "cargo", "go", "gem", "conda"}
REDIRECTIONS = re.compile(r"(?:\d|&)?>>?&?\s*[\w/.-]+")
OPERATORS = re.compile(r"[;&|()<>]+")
KEYWORDS = {"if", "then", "else", "elif", "do", "while", "until", "!", "{", "time", "exec", "sudo"}


class Refused(Exception):
    """Report why a task does not run here, in one line."""


def check_command(command: str) -> None:
    """Raise Refused for a missing package, and for commands that need a network."""
    for words in _simple_commands(command):
        _check_installer(words)
        if USER_CHANGERS & set(words[:1]):
            raise Refused(f"RUN {' '.join(words[:3])}: all commands run as one user here")
        if FETCHERS & set(words[:1]):
            raise Refused(f"RUN {' '.join(words[:3])}: there is no network")
        if words[:2] == ["git", "clone"] and any("://" in word for word in words):
            raise Refused("RUN git clone: there is no network")


def _simple_commands(command: str) -> list[list[str]]:
    """Split a shell text at its operators. Raises Refused for quotations without an end."""
    lexer = shlex.shlex(REDIRECTIONS.sub(" ", command), posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    lexer.commenters = ""
    try:
        tokens = list(lexer)
    except ValueError:
        raise Refused(f"RUN {command[:60]}: a quotation without an end") from None
    commands: list[list[str]] = [[]]
    for token in tokens:
        if OPERATORS.fullmatch(token):
            commands.append([])
        elif commands[-1] or not (token in KEYWORDS or re.match(r"\w+=", token)):
            commands[-1].append(token)
    return [words for words in commands if words]


def _check_installer(words: list[str]) -> None:
    options = [word for word in words if word.startswith("-")]
    names = [word for word in words if not word.startswith("-")]
    if names[0] in ("apt-get", "apt") and names[1:2] == ["install"]:
        for name in names[2:]:
            check_debian(name)
    if names[:2] in (["python3", "pip"], ["python", "pip"]):
        names = names[1:]  # python3 -m pip
    if names[:1] == ["uv"]:
        names = names[1:]
    if names and names[0] in ("pip", "pip3") and names[1:2] == ["install"]:
        if any(option in ("-r", "--requirement", "-e", "--editable") for option in options):
            raise Refused("RUN pip install -r: a list of packages")
        for name in names[2:]:
            check_python(name)


def check_debian(name: str) -> None:
    """Raise Refused for a Debian package that is needed and not here."""
    plain = name.partition("=")[0]
    if plain in NOT_NEEDED:
        return
    if shutil.which(COMMANDS.get(plain, plain), path="/usr/bin:/bin:/usr/sbin:/sbin") is None:
        raise Refused(f"the Debian package {plain} is not here")


def check_python(requirement: str) -> None:
    """Raise Refused unless a Python package is here, in the version that is asked for."""
    match = re.match(r"['\"]?([\w.-]+)(?:\[[\w,-]+\])?(?:==([\w.]+))?", requirement)
    if match is None:
        raise Refused(f"pip install {requirement}")
    name, version = match[1], match[2]
    if name.lower() in RUNNERS:
        return
    try:
        present_version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        raise Refused(f"the Python package {name} is not here") from None
    if version and version != present_version:
        raise Refused(f"the Python package {name} is here as {present_version}, not {version}")


def check_users(name: str, text: str) -> None:
    """Raise Refused for a test that runs something as a second user."""
    expression = SECOND_USER_IN_PYTHON if name.endswith(".py") else SECOND_USER
    match = expression.search(text)
    if match:
        word = " ".join(match[0].split())
        raise Refused(f"{name}: `{word}`: all commands run as one user here")


def check_verifier(script: str) -> None:
    """Raise Refused for a test script that installs what is not here.

    Published scripts fetch uv and run pytest with it. Both have stand-ins (`container.py`).
    """
    plain = re.sub(r"\\[ \t]*\n", " ", script)
    for line in plain.splitlines():
        if line.lstrip().startswith("#"):
            continue
        for name in re.findall(r"(?:\s-w|\s--with)[ =]([\w.\[\]=-]+)", line):
            check_python(name)
        requirements = re.search(r"\b(?:uv add|pip3? install|uv pip install)\s+(.*)", line)
        for name in requirements[1].split() if requirements else ():
            if name in ("&&", ";", "||", "|", ">"):
                break
            if not name.startswith("-"):
                check_python(name)
        packages = re.search(r"\bapt(?:-get)? +(?:-\S+ +)*install +(.*)", line)
        for name in packages[1].split() if packages else ():
            if name in ("&&", ";", "||", "|", ">"):
                break
            if not name.startswith("-"):
                check_debian(name)
        if re.search(r"\bgit clone\b|\bnpm\b|\bcargo\b|\bdocker\b", line):
            raise Refused(f"tests/test.sh needs a network: {line.strip()[:60]}")
        fetches = re.search(r"\b(?:curl|wget)\b", line) and "astral.sh/uv" not in line
        if fetches and re.search(r"https?://(?!localhost|127\.)", line):
            raise Refused(f"tests/test.sh needs a network: {line.strip()[:60]}")
