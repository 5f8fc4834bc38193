"""Translate a Dockerfile to one shell script, which builds its file system inside the sandbox.

In: the text of a Dockerfile of the subset. Out: a `Build`: the script, and the names of the
variables that it leaves to commands. Next: `container.py` runs the script.

    FROM         an image of Python, Debian or Ubuntu; this machine's system stands in for it
    RUN          `/bin/sh -c`; packages.py checks that its packages are here
    COPY, ADD    `cp` and `tar`, from the folder environment/, which is bound read-only
    WORKDIR      `mkdir` and `cd`
    ENV, ARG     `export`

The shell expands variables: `$NAME`, `${NAME}`, `${NAME:-text}` and `${NAME:+text}`. What a script
cannot say is refused here, before anything runs. This machine neither opens a path of the
Dockerfile nor expands anything.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass, field

from agent_r1_recipes.harbor.packages import Refused, check_command

CONTEXT = "/agent-r1/given"
"""Where the build context is inside."""
STAND_INS = re.compile(
    r"(?:docker\.io/|public\.ecr\.aws/docker/)?(?:library/)?(?:python:3\b|python:slim|ubuntu\b|debian\b)[\w.:-]*"
)
"""Images for which this machine's system may stand in."""
WITHOUT_EFFECT = {
    "LABEL", "EXPOSE", "CMD", "ENTRYPOINT", "MAINTAINER", "STOPSIGNAL", "HEALTHCHECK", "VOLUME",
}  # fmt: skip
READONLY = {"BASHOPTS", "BASH_VERSINFO", "EUID", "IFS", "PPID", "SHELLOPTS", "UID"}
"""Variables that a shell does not let anyone set, or that change how it reads the script."""
VARIABLE = re.compile(
    r"\$(?:[A-Za-z_]\w*|\{[A-Za-z_]\w*(?::?[-+](?:[^{}$\\'\"`]|\$[A-Za-z_]\w*|\$\{[A-Za-z_]\w*\})*)?\})"
)
NAME = re.compile(r"[A-Za-z_]\w*")
END = "\0end\0"
"""Stands before what the script prints at its end; commands printed all before it."""
FUNCTIONS = rf"""
set -e
fail() {{ printf '%s\n' "$*"; exit 1; }}
workdir() {{
  [ -n "$1" ] || fail "WORKDIR is empty"
  PATH=/usr/bin:/bin mkdir -p -- "$1"
  CDPATH='' cd -- "$1"
}}
copy() {{ # WORD MODE TARGET SOURCE...
  local PATH=/usr/bin:/bin IFS= word=$1 mode=$2 target=$3 into='' source path found name
  shift 3
  [ -n "$target" ] || fail "$word: the target is empty"
  case $target in */|.|..) into=1 ;; esac
  [ $# -eq 1 ] || into=1
  shopt -s nullglob dotglob
  for source in "$@"; do
    case /$source/ in */../*) fail "$word $source: it leaves environment/" ;; esac
    found=''
    for path in {CONTEXT}/$source; do
      [ -e "$path" ] || continue
      found=1
      name=$target
      if [ -d "$path" ]; then
        mkdir -p -- "$target"
        cp -dR --preserve=mode,timestamps,links -- "$path/." "$target"
        path=$path/.
      elif [ "$word" = ADD ] && tar -tf "$path" >/dev/null 2>&1; then
        mkdir -p -- "$target"
        tar -xf "$path" -C "$target" --no-same-owner
        continue
      else
        if [ -n "$into" ] || [ -d "$target" ]; then name=${{target%/}}/${{path##*/}}; fi
        mkdir -p -- "$(dirname -- "$name")"
        cp -L --preserve=mode,timestamps -- "$path" "$name"
      fi
      [ -z "$mode" ] || set_mode "$mode" "$path" "$name"
    done
    [ -n "$found" ] || fail "$word $source: no such file in environment/"
  done
  shopt -u nullglob dotglob
}}
set_mode() {{ # of what was copied, not of what was there before
  local PATH=/usr/bin:/bin
  if [ -d "$2" ]; then
    (cd -- "$2" && find . -mindepth 1 ! -type l -print0) | (cd -- "$3" && xargs -0r chmod "$1" --)
  else
    chmod "$1" -- "$3"
  fi
}}
"""


@dataclass
class Build:
    """A script that builds a task's file system, and what it tells at its end."""

    lines: list[str] = field(default_factory=list)
    steps: list[str] = field(default_factory=list)
    """The instructions in words, for a message."""
    variables: list[str] = field(default_factory=list)
    """Names of the variables of ENV."""
    left_out: list[str] = field(default_factory=list)
    """Paths of the context that no COPY sees: `ignore.py`."""

    @property
    def script(self) -> str:
        """Return the script. At its end it prints `END`, its directory, and the variables."""
        names = "".join(f' "${name}"' for name in ("PWD", "PATH", *self.variables))
        end = [r"printf '\0end\0'", rf"printf '%s\0'{names}"]
        return "\n".join([FUNCTIONS, *self.lines, *end])

    def add(self, step: str, line: str) -> None:
        """Add a step. Its number is printed first, so that a failure can be told."""
        self.steps.append(" ".join(step.split())[:100])
        self.lines += [f"printf '\\0%d\\0' {len(self.steps) - 1}", line]


def read_dockerfile(text: str) -> Build:
    """Translate a Dockerfile of the subset. Raises Refused."""
    build = Build()
    images = 0
    defaults: dict[str, str] = {}  # of ARG before FROM
    for word, rest in _instructions(text):
        step = f"{word} {rest}"
        if word == "FROM":
            images += 1
            _check_image(rest, images)
        elif word == "ARG" and not images:
            defaults |= {name: value for name, value in _assignments(word, rest) if value}
        elif word in WITHOUT_EFFECT:
            continue
        elif word == "WORKDIR":
            build.add(step, f"workdir {_word(rest)}")
        elif word == "ENV":
            pairs = [(name, value or "''") for name, value in _assignments(word, rest)]
            build.variables += [name for name, _ in pairs if name not in build.variables]
            build.add(step, _export(pairs))
        elif word == "ARG":
            pairs = [(n, value or defaults.get(n)) for n, value in _assignments(word, rest)]
            arguments = [(n, value) for n, value in pairs if value and n not in build.variables]
            if arguments:
                build.add(step, _export(arguments))
        elif word == "USER":
            if rest.strip() not in ("root", "0", "root:root", "0:0"):
                raise Refused(f"USER {rest.strip()}: all commands run as one user here")
        elif word in ("COPY", "ADD"):
            build.add(step, _copy(word, rest))
        elif word == "RUN":
            build.add(step, f"{_run(rest)} </dev/null")
        else:
            raise Refused(f"Dockerfile: {word}")
    if not images:
        raise Refused("Dockerfile: no FROM")
    build.variables = [name for name in dict.fromkeys(build.variables) if name != "PATH"]
    return build


def _instructions(text: str) -> list[tuple[str, str]]:
    """Split a Dockerfile into (INSTRUCTION, rest). Lines that end in a backslash go on."""
    if "\0" in text:
        raise Refused("Dockerfile: a zero byte")
    if re.search(r"^\s*#\s*escape\s*=\s*[^\\\s]", text, re.MULTILINE | re.IGNORECASE):
        raise Refused("Dockerfile: another escape character")
    # Comments and empty lines may stand within an instruction of several lines.
    lines = [line for line in text.splitlines() if line.strip() and line.lstrip()[0] != "#"]
    code = re.sub(r"\\[ \t]*\n", "", "\n".join(lines))
    instructions = []
    for line in code.split("\n"):
        if line.strip():
            word, _, rest = line.strip().partition(" ")
            instructions.append((word.upper(), rest.strip()))
    for word, rest in instructions:
        if word in ("RUN", "COPY", "ADD") and re.search(r"<<-?\s*['\"]?\w+", rest):
            raise Refused("Dockerfile: a here-document")
    return instructions


def _check_image(rest: str, images: int) -> None:
    words = [word for word in rest.split() if not word.startswith("--")]
    image = words[0].partition("@")[0] if words else ""
    if images > 1:
        raise Refused("Dockerfile: several FROM")
    if not STAND_INS.fullmatch(image):
        raise Refused(f"FROM {image or 'nothing'}: only images of Python, Debian and Ubuntu")


# ------------------------------------------------------------------------------------------- words


def _word(text: str) -> str:
    """Return a whole text as one word of the shell, in which variables are expanded."""
    word, end = _read_word(text, 0, spaces=True)
    assert end == len(text), "only a space ends a word early"
    return word


def _words(text: str) -> list[str]:
    words = []
    place = 0
    while place < len(text):
        if text[place].isspace():
            place += 1
            continue
        word, place = _read_word(text, place)
        words.append(word)
    return words


def _read_word(text: str, place: int, spaces: bool = False) -> tuple[str, int]:
    """Read a word by Docker's rules of quotes, and write it by the shell's.

    Returns the word and the place after it. Everything but a variable becomes a literal text, so
    nothing else can be expanded or run. Raises Refused for an expansion that is not in the subset.
    """
    parts = ["''"]
    quote = ""
    while place < len(text):
        letter = text[place]
        following = text[place + 1 : place + 2]
        if letter.isspace() and not quote and not spaces:
            break
        if quote == "'" and letter != "'":
            parts.append(shlex.quote(letter))
        elif letter in "'\"" and quote in ("", letter):
            quote = "" if quote else letter
        elif letter == "\\" and following and (not quote or following in '"$\\'):
            parts.append(shlex.quote(following))
            place += 1
        elif letter == "$":
            variable = VARIABLE.match(text, place)
            if variable is None and following == "{":
                raise Refused(f"Dockerfile: the expansion {text[place : place + 30]}")
            parts.append(f'"{variable[0]}"' if variable else "'$'")
            place += len(variable[0]) - 1 if variable else 0
        else:
            parts.append(shlex.quote(letter))
        place += 1
    if quote:
        raise Refused(f"Dockerfile: a quotation without an end: {text[:60]}")
    return "".join(parts), place


def _assignments(word: str, rest: str) -> list[tuple[str, str | None]]:
    """Return the names and values of ENV or ARG; None without a value."""
    pairs: list[tuple[str, str | None]] = []
    first = NAME.match(rest)
    if word == "ENV" and first and rest[first.end() : first.end() + 1].isspace():
        pairs.append((first[0], _word(rest[first.end() :].strip())))  # ENV NAME VALUE
    else:
        place = 0
        while place < len(rest):
            name = NAME.match(rest, place)
            if name is None:
                raise Refused(f"Dockerfile: {word} {rest[place : place + 60]}")
            place = name.end()
            value = None
            if rest[place : place + 1] == "=":
                value, place = _read_word(rest, place + 1)
            elif word == "ENV" or rest[place : place + 1].strip():
                raise Refused(f"Dockerfile: {word} {rest[:60]}")
            pairs.append((name[0], value))
            place += len(rest[place:]) - len(rest[place:].lstrip())
    for name, _ in pairs:
        if name in READONLY:
            raise Refused(f"Dockerfile: {word} {name}: a shell keeps that variable for itself")
    return pairs


def _export(pairs: list[tuple[str, str]]) -> str:
    """Return the line. The shell expands all values first, as Docker does."""
    return "export " + " ".join(f"{name}={value}" for name, value in pairs)


# ------------------------------------------------------------------------------------ instructions


def _copy(word: str, rest: str) -> str:
    mode = ""
    while rest.startswith("--"):
        option, _, rest = rest.partition(" ")
        rest = rest.strip()
        name, _, value = option.partition("=")
        if name == "--chmod" and re.fullmatch(r"[0-7]{3,4}", value):
            mode = value
        elif name != "--link" and (name, value) not in (
            ("--chown", "root"), ("--chown", "root:root"), ("--chown", "0"), ("--chown", "0:0"),
        ):  # fmt: skip
            source = " from another image" if name == "--from" else ""
            raise Refused(f"Dockerfile: {word}{source} {option}")
    try:
        words = _words(rest)
        if rest.startswith("["):
            words = [_word(_literal(name)) for name in json.loads(rest)]
    except (ValueError, TypeError, RecursionError):
        raise Refused(f"Dockerfile: {word} {rest[:60]}") from None
    if len(words) < 2 or "://" in rest or "git@" in rest:
        raise Refused(f"Dockerfile: {word} {rest[:60]}")
    if any(
        ".." in part.split("/") for part in rest.replace('"', "/").replace("'", "/").split()[:-1]
    ):
        raise Refused(f"Dockerfile: {word} {rest[:60]}: it leaves environment/")
    *sources, target = words
    return " ".join(["copy", word, mode or "''", target, *sources])


def _literal(name: object) -> str:
    """Return a word of a JSON list, in which only variables have a meaning."""
    if not isinstance(name, str):
        raise TypeError(name)
    return re.sub(r"([\\'\"])", r"\\\1", name)


def _run(rest: str) -> str:
    """Return the command of RUN for the script."""
    while rest.startswith("--"):
        option, _, rest = rest.partition(" ")
        rest = rest.strip()
        if not option.startswith(("--mount=type=cache", "--network=")):
            raise Refused(f"Dockerfile: RUN {option}")
    if rest.startswith("["):
        try:
            words = [str(word) for word in json.loads(rest)]
        except (ValueError, TypeError, RecursionError):
            raise Refused(f"Dockerfile: RUN {rest[:60]}") from None
        check_command(shlex.join(words))
        return f"command -- {shlex.join(words)}"
    check_command(rest)
    # `python -m pip` is no program of the PATH, so no stand-in can take its place.
    command = re.sub(r"\bpython3? -m pip\b", "pip", rest)
    return f"/bin/sh -c {shlex.quote(command)}"
