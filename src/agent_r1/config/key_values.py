"""Find values in commands and addresses that may be keys or passwords.

In: the text of a setting. Out: the name of what holds the value, such as `--api-key`. The value is
never part of an answer. A key without a name, such as `-k VALUE`, is found only by its form.
"""

from __future__ import annotations

import re
from typing import Any

SECRET_NAMES = {
    "key", "apikey", "token", "secret", "password", "passwd", "passphrase", "pass", "pwd",
    "credential", "credentials", "bearer", "auth", "authorization", "cookie", "sig", "signature",
    "jwt", "pat",
}  # fmt: skip
"""Last word of a name: `--openai-api-key`, `clientSecret`, `SHOP_TOKEN`."""
MAYBE_A_MODE = {"auth", "pass", "pat", "sig"}
"""Before a value without a digit, such as `--auth oauth`, these are no keys."""
NAMED = re.compile(
    r"""(?<![\w/.-])(?P<quote>["']?)(?P<dashes>-{0,2})(?P<name>[A-Za-z_][\w.-]*)(?P=quote)
    (?P<sign>\s*=|\s*:|["']?\s+)\s*["']?(?=(?P<value>[^\s"'$-][^\s"']*))""",
    re.VERBOSE,
)
"""NAME=value, NAME: value and --NAME value. `$VALUE` is a variable of a shell, and no value."""
ANY_NAME = re.compile(
    r"""(?:^|[\s'"=;({]|\s-e)(?P<variable>[A-Z_][A-Z0-9_]*)=["']?[^\s'"$]  # sh -c 'KEY=x ...'
    |(?:^|[\s'"/])env\s+(?:-[uC]\s+\S+\s+|-\S+\s+)*["']?(?P<assigned>\w+)=["']?[^\s'"$]
    |\s(?:-e|--env)[\s=]*["']?(?P<container>\w+)=["']?[^\s'"$]  # docker run -e key=x
    |\s(?P<user>-u|--user|--proxy-user)[\s=]*["']?[^\s"':]+:[^\s"']  # curl -u me:x
    |[?&;\#](?P<query>code)=[^\s&]
    |://(?P<address>[^/\s@]*)@""",
    re.VERBOSE,
)
KEY_FORMS = re.compile(
    r"""(?:^|[\s'"=/])(?P<known>sk[-_]|rk_|gh[opsu]_|github_pat_|glpat-|hf_|npm_|pypi-|xox[abp]-
        |AKIA|ASIA|AIza|ya29\.|eyJ)[\w-]{12}
    |(?:(?<![\w/.@\#:+-])|://\S{1,99}?/)(?P<long>(?=[A-Za-z]*\d)[A-Za-z0-9]{20,})(?!\w)""",
    re.VERBOSE,
)
"""Beginnings of keys that companies chose, and long words of letters and digits."""


def find_key(text: str) -> str | None:
    """Return the name of what may hold a key in a text, or None."""
    for match in NAMED.finditer(text):
        if _holds_key(match):
            return match["dashes"] + match["name"]
    match = ANY_NAME.search(text) or KEY_FORMS.search(text)
    if match is None:
        return None
    kind = str(match.lastgroup)
    if kind == "address":
        return "the user"
    if kind == "long":
        return "a long word"
    return match[kind]


def _holds_key(match: re.Match[str]) -> bool:
    words = re.findall(r"[A-Z]?[a-z0-9]+|[A-Z0-9]+", match["name"])
    last = words[-1].lower() if words else ""
    if last not in SECRET_NAMES or words[0].lower() == "no":
        return False
    if last in MAYBE_A_MODE and not re.search(r"\d", match["value"]):
        return False
    sign = match["sign"].strip(" \"'")
    if sign == "":
        return bool(match["dashes"])  # `password x` may be two arguments, `--password x` is one
    # `auth:latest` is an image of Docker, and `"auth": ...` is JSON.
    return sign == "=" or len(words) > 1 or bool(match["quote"]) or last not in MAYBE_A_MODE


def addresses(values: dict[str, Any]) -> list[tuple[str, str]]:
    """List (setting, address) of all addresses in nested values, however deep."""
    found: list[tuple[str, str]] = []
    seen: set[int] = set()  # YAML's `&a [*a]` is a list that contains itself
    waiting: list[tuple[str, Any]] = [("", values)]
    while waiting:
        setting, value = waiting.pop()
        if isinstance(value, dict | list):
            if id(value) in seen:
                continue
            seen.add(id(value))
        if isinstance(value, dict):
            waiting += [(f"{setting}.{name}".lstrip("."), inner) for name, inner in value.items()]
        elif isinstance(value, list):
            waiting += [(setting, inner) for inner in value]
        elif isinstance(value, str) and "://" in value:
            found.append((setting, value))
    return found
