"""Read an answer of mathematics as people write it: formatting, unit, number. Nothing is computed.

In: the text of an answer or of a target. Out: a `Reading`: plain text, value, unit. Next:
`math_inside.py` compares two of them. One rule serves all words: a unit is whatever words follow
the value, and it may be left out. Two different units are never equal.

Every pattern here runs over text of a language model, so each is linear or works on 300 characters
(`MAX_ANSWER_CHARS` in maths.py).
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction
from math import gcd

# ------------------------------------------------------------------------------------- formatting

VULGAR = {
    "½": "1/2", "⅓": "1/3", "⅔": "2/3", "¼": "1/4", "¾": "3/4", "⅕": "1/5", "⅖": "2/5",
    "⅗": "3/5", "⅘": "4/5", "⅙": "1/6", "⅚": "5/6", "⅛": "1/8", "⅜": "3/8", "⅝": "5/8",
    "⅞": "7/8",
}  # fmt: skip
SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
SIGNS = str.maketrans(
    {
        "−": "-",
        "–": "-",
        "‐": "-",
        "‑": "-",
        "﹣": "-",
        "－": "-",
        "°": r"^\circ ",
        "˚": r"^\circ ",
        "º": r"^\circ ",
        "×": r"\times ",
        "·": r"\cdot ",
        "⋅": r"\cdot ",
        "π": r"\pi ",
        "∞": r"\infty ",
        "∅": r"\emptyset ",
        "≤": r"\le ",
        "≥": r"\ge ",
        "μ": "µ",
        "“": '"',
        "”": '"',
        "’": "'",
        "‘": "'",
        "％": "%",
        "￥": "¥",
    }
)
SUPERSCRIPT = re.compile(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+")
FULL_WIDTH = re.compile(r"[！-～]")
"""Letters, digits and signs as Chinese and Japanese text writes them."""
THOUSANDS = re.compile(r"\{,\}|,\\!\s*")
"""A comma between thousands, as TeX writes it."""
TEX_SPACE = re.compile(r"(?<!\\)\\[,;:! ]|(?<!\\)\\q?quad(?![a-zA-Z])|~|[\s\u200b]+")
TEX_SIZE = re.compile(r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle)(?![a-zA-Z])\s*")
SMALL_FRACTION = re.compile(r"\\[dtc]frac(?![a-zA-Z])")
ONE_CHARACTER = re.compile(r"([_^])\{(\w)\}")
"""An exponent or index of one character, whose braces change nothing."""
WRAPPER = (
    r"\\(?:text(?:rm|bf|it|sf|tt|normal|up)?|math(?:rm|bf|it|sf|tt|normal)|[mh]box"
    r"|bm|boldsymbol|emph|underline)(?![a-zA-Z])\s*"
)
"""A TeX command that changes only how its text looks. `\\mathbb` is none: it names other sets."""
WRAPPER_START = re.compile(WRAPPER + r"\{")
BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
PAIRS = [
    ("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("***", "***"), ("**", "**"),
    ("__", "__"), ("*", "*"), ("_", "_"), ("``", "``"), ("`", "`"), ('"', '"'), ("'", "'"),
    ("<b>", "</b>"), ("<i>", "</i>"), ("<strong>", "</strong>"), ("<em>", "</em>"),
]  # fmt: skip
"""Marks around a whole answer: TeX, Markdown, quotes, HTML."""
PARTLY_MARKED = re.compile(r"^(\*\*|__|`)([^*_`]+)\1 ")
"""A marked number before its unit: `**18** apples`."""
MAX_LAYERS = 12
"""Layers of formatting that are removed; `**$\\boxed{\\text{73}}$**` has four."""


def plain(text: str) -> str:
    """Remove the formatting around a whole answer, and write its signs in one way."""
    text = _uniform(text)
    for _ in range(MAX_LAYERS):
        inner = _unwrap(text.strip().rstrip(".").rstrip())
        if inner == text:
            break
        text = inner
    text = PARTLY_MARKED.sub(r"\2 ", text)
    return _without_dollars(text)


def _uniform(text: str) -> str:
    """Write signs, blanks and fractions in one way."""
    for sign, fraction in VULGAR.items():
        text = text.replace(sign, f" {fraction} ")
    text = SUPERSCRIPT.sub(lambda match: f"^{{{match[0].translate(SUPERSCRIPTS)}}}", text)
    text = FULL_WIDTH.sub(lambda match: unicodedata.normalize("NFKC", match[0]), text)
    text = THOUSANDS.sub(",", text.translate(SIGNS))
    text = TEX_SIZE.sub("", TEX_SPACE.sub(" ", text))
    text = SMALL_FRACTION.sub(r"\\frac", text).replace(r"\varnothing", r"\emptyset")
    return ONE_CHARACTER.sub(r"\1\2", text).strip()


def _unwrap(text: str) -> str:
    """Remove one layer of formatting, if there is one around the whole text."""
    for opening, closing in PAIRS:
        inside = text[len(opening) : -len(closing)]
        is_enclosed = len(text) > len(opening + closing) and inside.strip()
        is_enclosed = is_enclosed and text.startswith(opening) and text.endswith(closing)
        # `$1$ or $2$` begins and ends with a dollar, but no pair of dollars encloses it. `\$` is
        # money.
        if is_enclosed and opening not in inside.replace(r"\$", "") and inside[-1] != "\\":
            return inside.strip()
    if text.startswith("{") and _closing(text, 0) == len(text) - 1:
        return text[1:-1].strip()
    match = WRAPPER_START.match(text) or BOX.match(text)
    if match and _closing(text, match.end() - 1) == len(text) - 1:
        return text[match.end() : -1].strip()
    return text


def _closing(text: str, opening: int) -> int:
    """Return where the brace that opens at `opening` closes; -1 if nowhere."""
    depth = 0
    for place in range(opening, len(text)):
        is_escaped = place > 0 and text[place - 1] == "\\"
        if text[place] == "{" and not is_escaped:
            depth += 1
        elif text[place] == "}" and not is_escaped:
            depth -= 1
        if depth == 0:
            return place
    return -1


def _without_dollars(text: str) -> str:
    """Tell the two meanings of a dollar sign apart.

    `$5` is money, `$5$ cm` is TeX.
    """
    bare = text.replace(r"\$", "")
    if bare.count("$") == 1:
        return text if r"\$" in text else text.replace("$", r"\$")
    return re.sub(r"(?<!\\)\$", " ", text).strip() if "$" in bare else text


def normal(text: str) -> str:
    """Return the text without the blanks that mean nothing.

    The blank of `1 1/2` stays, because `11/2` is another number.
    """
    return re.sub(r"(?<!\w) | (?!\w)", "", " ".join(text.split()))


# ------------------------------------------------------------------------------------------- units

SYMBOLS = {
    "mm": "mm", "millimeter": "mm", "millimetre": "mm", "cm": "cm", "centimeter": "cm",
    "centimetre": "cm", "dm": "dm", "m": "m", "meter": "m", "metre": "m", "km": "km",
    "kilometer": "km", "kilometre": "km", "in": "inch", "inch": "inch", "inches": "inch",
    "ft": "foot", "foot": "foot", "feet": "foot", "yd": "yard", "mi": "mile", "mile": "mile",
    "mg": "mg", "milligram": "mg", "g": "g", "gm": "g", "gram": "g", "kg": "kg", "kilogram": "kg",
    "lb": "pound", "lbs": "pound", "oz": "ounce", "ml": "ml", "milliliter": "ml",
    "millilitre": "ml", "l": "l", "liter": "l", "litre": "l", "gal": "gallon", "s": "s",
    "sec": "s", "second": "s", "min": "minute", "h": "h", "hr": "h", "hrs": "h", "hour": "h",
    "yr": "year", "mph": "mile/h", "kmh": "km/h", "kph": "km/h", "kmph": "km/h", "usd": "$",
    "dollar": "$", "cent": "cent", "euro": "€", "eur": "€", "percent": "%", "pct": "%",
    "percentage": "%", "degree": "°", "deg": "°", "rad": "radian", "am": "am", "pm": "pm",
    "th": "th", "st": "th", "nd": "th", "rd": "th", "rs": "rupee", "men": "man", "women": "woman",
    "people": "person", "children": "child", "sq": "sq", "cu": "cu", "hz": "hz", "n": "", "x": "",
    "pennies": "penny", "ms": "ms", "kj": "kj", "kw": "kw", "ha": "ha", "pt": "pt", "pts": "pt",
    "mw": "mw", "cc": "cc", "joule": "J", "newton": "N", "volt": "V", "watt": "W", "no": "",
    "or": "", "so": "",
}  # fmt: skip
"""Units by the name of their kind. An empty name is none. Two letters are a unit only if they are
here: `5ab` is a product."""
CAPITALS = ("J", "N", "V", "W")
"""Units of one capital letter, after a blank: `5 N`. `5N` is a product, and `5 M` is 5 million."""
SCALES = {"° celsius": "°C", "° fahrenheit": "°F", "° kelvin": "°K"}
POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
WORDS_OF_NUMBERS = """
    hundred thousand million billion trillion dozen score half halves third thirds fourth fourths
    fifth fifths sixth sixths seventh eighth eighths ninth tenth tenths hundredth hundredths
    thousandth thousandths twice zero one two three four five six seven eight nine ten eleven
    twelve twenty thirty forty fifty sixty seventy eighty ninety factorial times plus minus over
    divided mod modulo point pi sqrt sin cos tan cot sec csc log exp infinity root
"""
NO_UNITS = frozenset(WORDS_OF_NUMBERS.split())
"""Words that belong to the number: `5 million` is not 5."""
WORDS_OF_SENTENCES = """
    is are was were be been and or but not nor so if then than because since which that this
    these it the a an as answer equals equal maybe perhaps has have had does do did can will
    would should must may might only either neither correct wrong right true false i you we
"""
NO_UNITS_IN_SENTENCES = frozenset(WORDS_OF_SENTENCES.split())
"""An answer that is quoted in a sentence is wrong."""
MAX_UNIT_WORDS = 4
"""Such as *cubic feet per second*."""
LETTERS = r"[^\W\d_]"
WORD = rf"{LETTERS}(?:{LETTERS}|['-](?={LETTERS}))*\.?(?:\^\{{?-?\d\}}?)?"
UNIT = re.compile(
    rf"(?<!\\)(?<!{LETTERS})(?:/ ?(?={LETTERS}{{3}}))?{WORD}"
    rf"(?:(?: ?(?:/|\\cdot|\*) ?| ){WORD})*(?:\^\{{?-?\d\}}?)?$"
)
DEGREES = re.compile(r"\s*(?:\^\s*\{?\s*\\circ\s*\}?|\\degree)\s*([CFK]?)$")
PERCENT = re.compile(r"\s*\\?%$")
CURRENCIES = "$€£¥₹₽₩₺₫₪฿"
MONEY_BEFORE = re.compile(rf"([-+]?) ?(?:US)?\\?([{CURRENCIES}]) ?(?=[-+]?[\d.\\])")
MONEY_AFTER = re.compile(rf"\s*\\?([{CURRENCIES}])$")
ORDINAL = re.compile(r"(?<=\d) ?\^ ?\{? ?(?:st|nd|rd|th) ?\}?$")
FUNCTION = re.compile(r"\\(?:arc)?(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])")
"""A function of an angle: the degrees belong to its argument, not to the value."""
HALF_DAY = re.compile(r"\s*\b([ap])\.? ?m\.?$", re.IGNORECASE)
CLOCK = re.compile(r"\d{1,2}(?::\d\d){0,2}")


QUANTITY = re.compile(rf"(\d+(?:\.\d+)?) ?({LETTERS}+)")
QUANTITIES = re.compile(rf"{QUANTITY.pattern}(?:(?:, ?| ){QUANTITY.pattern})+")


@dataclass(frozen=True)
class Reading:
    """A text of mathematics, read."""

    text: str
    """Without formatting around it, blanks that mean nothing, and wrappers around its words."""
    value: str
    """The text without its unit."""
    unit: str = ""
    """The unit in one spelling: `cm^2` for `square centimeters`. Empty if there is none."""


def read(text: str) -> Reading:
    """Read an answer or a target."""
    text = plain(text)
    words = _without_wrappers(text)
    value, unit = _split_unit(words, words != text)
    # Without a unit, the wrappers stay: math-verify knows what `\text{or}` means between numbers.
    return Reading(normal(words), value if unit else text, unit)


def _without_wrappers(text: str) -> str:
    """Replace `\\text{ cm}` by ` cm`, wherever it is."""
    for _ in range(MAX_LAYERS):
        match = WRAPPER_START.search(text)
        if match is None:
            break
        end = _closing(text, match.end() - 1)
        if end < 0:
            break
        text = f"{text[: match.start()]} {text[match.end() : end]} {text[end + 1 :]}"
        # A power of a unit may stand outside its wrapper: \text{cm}^2.
        text = re.sub(r" +(?=\^)", "", " ".join(text.split()))
    return text


def _split_unit(text: str, has_wrapper: bool) -> tuple[str, str]:
    """Split `18 apples` into value and unit. The unit is "" if there is none.

    `has_wrapper`: the text had words in TeX's wrappers, so that a single letter is no variable.
    """
    if match := MONEY_BEFORE.match(text):
        value, unit = _split_unit(match[1] + text[match.end() :], has_wrapper)
        return value, match[2] + unit.removeprefix(match[2])
    for pattern, kind in ((DEGREES, "°"), (PERCENT, "%"), (MONEY_AFTER, "")):
        match = pattern.search(text)
        if match and match.start() > 0 and not FUNCTION.search(text):
            return text[: match.start()], kind + (match[1] if match.groups() else "")
    if match := ORDINAL.search(text):
        return text[: match.start()], "th"
    match = HALF_DAY.search(text)
    if match and CLOCK.fullmatch(text[: match.start()].strip()):
        return text[: match.start()].strip(), f"{match[1].lower()}m"
    match = UNIT.search(text)
    if match is None:
        return text, ""
    value, words = text[: match.start()], match[0]
    # Without a digit or a command there is no value, but a text such as "no solution". After an
    # operator, the words are a part of the value: `3 + s`.
    if not re.search(r"[\d\\]", value) or not re.search(r"[\w})\]|!.]\s*$", value):
        return text, ""
    # In `2\pi h`, the letter is a variable. In `3 h` and `2\pi\text{ h}` it is a unit.
    symbolic = not has_wrapper and number(value) is None and words not in ("m", "g", "L")
    if symbolic and re.search(rf"(?<!{LETTERS}){LETTERS}(?!{LETTERS})", words):
        return text, ""
    unit = _unit_named(words, is_attached=not value.endswith(" "))
    return (value.strip(), unit) if unit else (text, "")


def _unit_named(words: str, is_attached: bool) -> str:
    """Return the unit of these words in one spelling; "" if they are none.

    `is_attached`: no blank stands between the value and the words, as in `5cm`.
    """
    parts = re.sub(r"\bper\b", "/", words.replace(r"\cdot", "*")).replace("/", " / ").split()
    names = [part for part in parts if part not in ("/", "*")]
    if len(names) > MAX_UNIT_WORDS or not names:
        return ""
    power, spelling = 1, []
    for part in parts:
        word, _, exponent = part.rstrip(".").partition("^")
        if part in ("/", "*"):
            spelling.append("/" if part == "/" else "")
        elif word.lower() in POWERS:
            power = POWERS[word.lower()]
        elif word.lower() in ("squared", "cubed") and spelling:
            spelling[-1] += "^2" if word.lower() == "squared" else "^3"
        else:
            name = _word_named(word, is_attached and part is parts[0])
            if not name:
                return ""
            exponent = exponent.strip("{}") or (str(power) if power > 1 else "")
            spelling.append(name + (f"^{exponent}" if exponent else ""))
            power = 1
    unit = " ".join(" ".join(spelling).split()).replace(" / ", "/").replace("/ ", "/")
    return SCALES.get(unit, unit)


def _word_named(word: str, is_attached: bool) -> str:
    """Return the unit that one word names, without its plural; "" if it is none."""
    lower = word.lower()
    if lower in NO_UNITS or lower in NO_UNITS_IN_SENTENCES:
        return ""
    for ending in ("", "s", "es"):
        stem = lower.removesuffix(ending)
        # `ms` is no plural of `m`.
        is_known = stem in SYMBOLS and lower.endswith(ending) and (not ending or len(stem) > 2)
        # Capitals of short symbols are others: `5 M` is 5 million, `N` is a force.
        if is_known and (len(word) > 1 or word.islower() or word == "L"):
            return SYMBOLS[stem]
    if word in CAPITALS and not is_attached:
        return word
    if is_attached or len(word) < 3:
        return ""
    # `celsius`, `glass` and `axis` are no plurals.
    plural = len(lower) > 3 and not lower.endswith(("ss", "us", "is"))
    return lower.removesuffix("s") if plural else lower


def quantities(text: str) -> list[tuple[Fraction, str]] | None:
    """Read a quantity such as `3 hours 20 minutes`; None for other texts."""
    if not QUANTITIES.fullmatch(text):
        return None
    parts = []
    for digits, words in QUANTITY.findall(text):
        unit = _unit_named(words, is_attached=False)
        if not unit:
            return None
        parts.append((Fraction(digits), unit))
    return parts


# ------------------------------------------------------------------------- numbers in a fixed order

SERIES = re.compile(r"\d+(?:-\d+){2,}|\d+(?:\.\d+){2,}")
"""A date, a version, an address: `2023-03-14` is no difference."""
ROMAN = re.compile(r"[IVX]{2,}|[IVXLCDM]{3,}")
"""A Roman numeral. As a product of letters, `XIV` would be `XVI`."""
WITH_BASE = re.compile(r"(-?(?=[A-F]*\d)[0-9A-F]+)_(\w+)")
"""A numeral with its base: `1011_2`, `2A_16`, `123_five`."""


def with_base(text: str) -> tuple[str, ...] | None:
    """Return a numeral's digits and its base; None for other texts."""
    match = WITH_BASE.fullmatch(re.sub(r"\\(?:text|mathrm)(?![a-zA-Z])|[{}() ]", "", text))
    return match.groups() if match else None


def numbers_and_words(text: str) -> list[Fraction | str] | None:
    """Read numbers with words between, such as `7 out of 10`; None for other texts.

    math-verify multiplies them, so that `10 out of 7` would be equal.
    """
    tokens: list[Fraction | str] = []
    for word in text.split():
        value = number(word)
        if value and value.form == "numeral":
            tokens.append(value.value)
        elif word.isalpha() and word not in ("and", "or"):
            tokens.append(word.casefold())
        else:
            return None
    numerals = [place for place, token in enumerate(tokens) if isinstance(token, Fraction)]
    has_word_between = bool(numerals) and numerals[-1] - numerals[0] >= len(numerals)
    return tokens if has_word_between else None


# ----------------------------------------------------------------------------------------- numbers

WHOLE = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
SPACED_THOUSANDS = r"\d{1,3}(?: \d{3})+"
"""Thousands with blanks, in a number that stands alone: in `1 100/200` the blank means another."""
NUMERAL = re.compile(
    rf"([-+]?) ?((?:{WHOLE}|{SPACED_THOUSANDS})(?:\.\d*)?|\.\d+)(?:[eE]([-+]?\d{{1,3}}))?"
)
SCIENTIFIC = re.compile(
    r"([-+]?\d+(?:\.\d*)?) ?(?:\\times|\\cdot|\*|x) ?10 ?\^ ?\{?([-+]?\d{1,3})\}?"
)
PART = rf"(?: ?\{{ ?([-+]?{WHOLE}) ?\}}| ?(\d))"
FRACTION = re.compile(rf"([-+]?) ?(?:\\frac{PART}{PART}|([-+]?{WHOLE}) ?/ ?({WHOLE}))")
REPEATING = re.compile(r"([-+]?) ?(\d*)\.(\d*) ?\\overline ?\{? ?(\d+) ?\}?")
"""A decimal whose last digits repeat without end: `0.1\\overline{6}`."""
MIXED_NUMBER = re.compile(rf"([-+]?) ?({WHOLE}) ?(?:(\\frac.+)|(?<= )({WHOLE} ?/ ?{WHOLE}))")


@dataclass(frozen=True)
class Exact:
    """A number that is written out, with nothing left to compute."""

    value: Fraction
    form: str
    """`numeral`, `scientific`, `fraction` or `mixed`."""
    reduced: bool = True
    """Whether the fraction in it is in lowest terms."""
    decimals: int = 0
    """Digits after the decimal point, of a numeral."""
    significant: int = 0
    """Digits without leading zeros, of a numeral."""


def number(text: str) -> Exact | None:
    """Read an integer, decimal, fraction or mixed number; None for other texts."""
    text = " ".join(text.split())
    if match := NUMERAL.fullmatch(text):
        sign, digits, exponent = match.groups()
        digits = digits.replace(",", "").replace(" ", "")
        value = Fraction(sign + digits) * Fraction(10) ** int(exponent or 0)
        decimals = 0 if exponent else len(digits.partition(".")[2])
        significant = len(digits.replace(".", "").lstrip("0"))
        return Exact(value, "numeral", True, decimals, significant)
    if match := SCIENTIFIC.fullmatch(text):
        return Exact(Fraction(match[1]) * Fraction(10) ** int(match[2]), "scientific")
    if match := REPEATING.fullmatch(text):
        sign, whole, first, period = match.groups()
        tail = Fraction(int(period), 10 ** len(period) - 1)
        value = int(whole or 0) + (int(first or 0) + tail) / 10 ** len(first)
        return Exact(-value if sign == "-" else value, "fraction")
    if match := FRACTION.fullmatch(text):
        return _fraction(match)
    if match := MIXED_NUMBER.fullmatch(text):
        rest = FRACTION.fullmatch((match[3] or match[4]).strip())
        part = _fraction(rest) if rest and not rest[1] else None
        if part and 0 < part.value < 1:
            value = _integer(match[2]) + part.value
            return Exact(-value if match[1] == "-" else value, "mixed", part.reduced)
    return None


def _fraction(match: re.Match[str]) -> Exact | None:
    """Make a number of a match of `FRACTION`; None for a division by zero."""
    sign, *parts = match.groups()
    above, below = [_integer(part) for part in parts if part is not None]
    if below == 0:
        return None
    value = Fraction(above, below)
    return Exact(-value if sign == "-" else value, "fraction", gcd(above, below) == 1)


def _integer(digits: str) -> int:
    return int(digits.replace(",", "").replace(" ", ""))


def has_finite_decimal(value: Fraction) -> bool:
    """Return whether it can be written as a decimal: 1/8 can, 1/3 cannot."""
    below = value.denominator
    for prime in (2, 5):
        while below % prime == 0:
            below //= prime
    return below == 1


SIGNIFICANT = 5
"""Significant digits from which a rounded decimal is right: .33333 for 1/3, 3.1416 for pi."""
COMPARED_DECIMALS = 6
"""Decimals that are compared if that many have `SIGNIFICANT` digits. Longer texts are often a
computer's floats, whose last digits are noise."""


def is_rounded(answer: Exact, target: Fraction) -> bool:
    """Return whether a decimal is `target` rounded, which has no finite decimal.

    The target is given exactly, or to many more digits than an answer has.
    """
    if answer.form != "numeral" or not answer.decimals or answer.significant < SIGNIFICANT:
        return False
    places = COMPARED_DECIMALS
    # A small number needs more decimals for the same digits: 1/3000 is .00033333.
    while abs(target) * 10**places < 10 ** (SIGNIFICANT - 1) and places < answer.decimals:
        places += 1
    places = min(places, answer.decimals)
    return round(answer.value, places) == round(target, places)
