"""Bridges from other packages to countries: airports, chemical elements, other names of countries.

Sources: PyPI's ``airportsdata`` (MIT), ``mendeleev`` (MIT) and ``countryinfo`` (MIT). Each thing gets a
passage of its own, which names its country, and stands for that country in a question.
"""

from __future__ import annotations

import csv
import json
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata, resources
from typing import Any

from envs.retrieval.base import Passage
from envs.tasks.factbook.source import Country
from envs.tasks.factbook.text import slug, words

SOURCES = ("airportsdata", "mendeleev", "countryinfo")

_AIRPORTS_PER_COUNTRY = 6
# How the Factbook's lists of trade partners abbreviate, and where names differ between the sources.
_ABBREVIATIONS = {
    "UK": "United Kingdom",
    "US": "United States",
    "USA": "United States",
    "UAE": "United Arab Emirates",
    "NZ": "New Zealand",
    "S. Korea": "South Korea",
    "Korea, South": "South Korea",
    "Cote d'Ivoire": "Côte d'Ivoire",
    "The Gambia": "Gambia",
    "The Bahamas": "Bahamas",
    "Bahamas, The": "Bahamas",
    "Netherlands, The": "Netherlands",
    "Antigua & Barbuda": "Antigua and Barbuda",
    "Myanmar": "Burma",
    "Curaçao": "Curacao",
    "Saint Barthélemy": "Saint Barthelemy",
}
# Places that mendeleev names as countries, but that are parts of one or no longer exist.
_NO_COUNTRY = frozenset({"England", "Scotland", "Great Britain", "USSR"})


@dataclass(frozen=True)
class Bridge:
    """Something that belongs to one country.

    Attributes:
        described: how a question names the country by it, e.g. ``country where Kariba Airport is``.
        query: what to search for its passage.
        shown: the country's name as its passage has it.
    """

    key: str
    described: str
    query: str
    shown: str
    country: Country
    passage: Passage


class Atlas:
    """Finds a country by any of its names or its two-letter code."""

    def __init__(self, countries: Sequence[Country]) -> None:
        by_name = {country.name: country for country in countries}
        self._by_name = {slug(name): country for name, country in by_name.items()}
        self._by_code: dict[str, Country] = {}
        self._aliases: dict[str, tuple[str, ...]] = {}
        for short, name in _ABBREVIATIONS.items():
            if name in by_name:
                self._by_name[slug(short)] = by_name[name]
        for entry in _countryinfo():
            names = [entry["name"], *entry["altSpellings"]]
            found = next((self._by_name[slug(name)] for name in names if slug(name) in self._by_name), None)
            if found is None or found.name in self._aliases:
                continue
            self._by_code[entry["ISO"]["alpha2"]] = found
            self._aliases[found.name] = tuple(name for name in names if len(name) > 3 and name != found.name)

    def by_name(self, name: str) -> Country | None:
        return self._by_name.get(slug(name))

    def by_code(self, code: str) -> Country | None:
        return self._by_code.get(code)

    def aliases(self, country: Country) -> tuple[str, ...]:
        """Other names of the country, e.g. ``Republic of Poland``."""
        return self._aliases.get(country.name, ())


def airports(atlas: Atlas) -> Iterator[Bridge]:
    """International airports with a name of their own, at most six a country, the shortest names first."""
    path = resources.files("airportsdata") / "airports.csv"
    with path.open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["iata"] and "International" in row["name"]]
    times = Counter(slug(row["name"]) for row in rows)
    kept: dict[str, list[Bridge]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: (len(row["name"]), row["icao"])):
        country = atlas.by_code(row["country"])
        name = row["name"].strip()
        if country is None or times[slug(name)] > 1 or not name.endswith("Airport") or not row["city"]:
            continue
        if set(words(country.name)) & set(words(f"{name} {row['city']} {row['subd']}")):
            continue
        place = ", ".join(dict.fromkeys(part for part in (row["city"], row["subd"]) if part))
        text = (
            f"Airport in {place}, {country.name}. IATA code {row['iata']}, ICAO code {row['icao']}; "
            f"elevation {round(float(row['elevation']))} feet; time zone {row['tz'].split('/')[-1]}."
        )
        passage = Passage(f"airport/{row['iata'].lower()}", name, text)
        kept[country.name].append(
            Bridge("airport", f"country where {name} is", f"{name} country", country.name, country, passage)
        )
    for bridges in kept.values():
        yield from bridges[:_AIRPORTS_PER_COUNTRY]


def elements(atlas: Atlas) -> Iterator[Bridge]:
    """Chemical elements discovered in one of today's countries."""
    path = resources.files("mendeleev") / "elements.db"
    with resources.as_file(path) as file:
        connection = sqlite3.connect(f"file:{file}?mode=ro", uri=True)
        rows = connection.execute(
            "select name, symbol, atomic_number, discoverers, discovery_location, discovery_year, "
            "description from elements order by atomic_number"
        ).fetchall()
        connection.close()
    for name, symbol, number, discoverers, place, year, description in rows:
        country = atlas.by_name(place) if place and place not in _NO_COUNTRY else None
        if country is None or not discoverers or not year:
            continue
        text = (
            f"{name} is the chemical element {symbol} with atomic number {number}, discovered in {place} "
            f"in {year} by {discoverers}. {description or ''}"
        ).strip()
        passage = Passage(f"element/{slug(name)}", name, " ".join(text.split()))
        described = f"country where the element {name.lower()} was discovered"
        yield Bridge("element", described, f"{name} chemical element", place, country, passage)


def versions() -> Mapping[str, str]:
    """Of the packages joined here, for fingerprints."""
    return {name: metadata.version(name) for name in SOURCES}


@lru_cache(maxsize=1)
def _countryinfo() -> tuple[dict[str, Any], ...]:
    folder = resources.files("countryinfo") / "data"
    files = sorted(
        (file for file in folder.iterdir() if file.name.endswith(".json")), key=lambda file: file.name
    )
    return tuple(json.loads(file.read_text(encoding="utf-8")) for file in files)
