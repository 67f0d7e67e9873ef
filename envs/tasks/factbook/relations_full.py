"""The relations of the full world: those of the small one and more, read from the Factbook's own fields."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from envs.tasks.factbook.facts import Extract, Reading, Relation, read_first, read_full, read_number
from envs.tasks.factbook.relations import TINY_RELATIONS
from envs.tasks.factbook.source import without_note

_PERSON = re.compile(
    r"(?:[A-Z][\w' -]*? )?(?:President|King|Queen|Prime Minister|Emperor|Sultan|Governor|Premier|Chancellor|"
    r"Governor[- ]General|Prince|Grand Duke|Amir|Chief Minister|Administrator)\s+"
    r"(?P<name>[A-Z][^;,()]+?) \(since"
)


def _person(value: str) -> Reading | None:
    match = re.match(_PERSON, value)
    if not match or "(vacant)" in value:
        return None
    name = match["name"].strip()
    return Reading(name, value, (name.title(),))


def _time(value: str) -> Reading | None:
    match = re.match(r"UTC[+-]?\d*(?::\d+)?(?=\s|$)", value)
    return Reading(match[0], value) if match and len(match[0]) > 3 else None


def _whole(value: str) -> Reading | None:
    head = re.sub(r"\s*\([^()]*\)", "", without_note(value).split(";")[0]).strip(" ,")
    return Reading(head, value) if head and head in value and " or " not in head else None


def _official_language(value: str) -> Reading | None:
    names = re.findall(r"([A-Z][\w' -]+?) (?:\d[\d.]*% )?\(official\)", value)
    return Reading(names[0], value) if len(names) == 1 else None


def _noun(value: str) -> Reading | None:
    match = re.fullmatch(r"([A-Z][\w' -]+?)(?:\(s\)| \(singular and plural\))", value)
    return Reading(match[1], value, (f"{match[1]}s", value)) if match else None


def _figure(value: str) -> Reading | None:
    """A figure with its unit, up to the year in parentheses: ``43.4 years``, ``$1.649 trillion``."""
    match = re.match(r"(-?\$?[\d,]*\d(?:\.\d+)?%?(?: (?:trillion|billion|million|years))?)(?=[ ;]|$)", value)
    if not match or len(re.sub(r"\D", "", match[1])) < 2:
        return None
    bare = match[1].removesuffix(" years")
    return Reading(match[1], value, (bare,) if bare != match[1] else ())


def _partner(value: str) -> Reading | None:
    match = re.match(r"([A-Z][A-Za-z.' -]+?) \d+%", value)
    return Reading(match[1], value) if match else None


def _former_ruler(value: str) -> Reading | None:
    match = re.match(r"\d{1,2} \w+ \d{4} \(from (?:the )?([A-Z][A-Za-z ]+?)\)", value)
    return Reading(match[1], value) if match else None


def _only_neighbour(value: str) -> Reading | None:
    match = re.fullmatch(r"([A-Z][A-Za-z' -]+?) [\d,.]+ km", value)
    return Reading(match[1], value) if match else None


_GOV, _ECO, _PEO, _GEO = "Government", "Economy", "People and Society", "Geography"

# Where the names of the fields are too common to find them by.
_SEARCH = {
    "anthem": "anthem title",
    "area": "area total sq km",
    "population": "population total male female",
    "language": "languages official",
}


def _relation(key: str, phrase: str, path: str, extract: Extract, *, inverse: bool = False) -> Relation:
    return Relation(key, phrase, phrase.capitalize(), path, extract, (), inverse, _SEARCH.get(key, ""))


FULL_RELATIONS: tuple[Relation, ...] = (
    *(
        replace(relation, fillers=(), search=_SEARCH.get(relation.key, ""))
        for relation in TINY_RELATIONS
        # Lists of industries are long and their field's name is common: no plain query finds one surely.
        if relation.key != "industry"
    ),
    _relation("long-name", "official long name", f"{_GOV} > Country name > conventional long form", _whole,
              inverse=True),
    _relation("adjective", "adjective of nationality", f"{_PEO} > Nationality > adjective",
              read_full(r"[A-Z][\w' -]+")),
    _relation("noun", "noun of nationality", f"{_PEO} > Nationality > noun", _noun, inverse=True),
    _relation("head-of-state", "chief of state", f"{_GOV} > Executive branch > chief of state", _person,
              inverse=True),
    _relation("head-of-government", "head of government", f"{_GOV} > Executive branch > head of government",
              _person, inverse=True),
    _relation("government", "type of government", f"{_GOV} > Government type", _whole),
    _relation("time", "time difference of the capital", f"{_GOV} > Capital > time difference", _time),
    _relation("colors", "set of national colors", f"{_GOV} > National color(s)", _whole),
    _relation("language", "only official language", f"{_PEO} > Languages > Languages", _official_language),
    _relation("population", "total population", f"{_PEO} > Population > total", _figure),
    _relation("median-age", "median age", f"{_PEO} > Median age > total", _figure),
    _relation("life-expectancy", "life expectancy at birth",
              f"{_PEO} > Life expectancy at birth > total population", _figure),
    _relation("growth", "population growth rate", f"{_PEO} > Population growth rate", _figure),
    _relation("birth-rate", "birth rate", f"{_PEO} > Birth rate", _figure),
    _relation("death-rate", "death rate", f"{_PEO} > Death rate", _figure),
    _relation("urban", "urban population", f"{_PEO} > Urbanization > urban population", _figure),
    _relation("obesity", "adult obesity rate", f"{_PEO} > Obesity - adult prevalence rate", _figure),
    _relation("gdp", "gross domestic product at the official exchange rate",
              f"{_ECO} > GDP (official exchange rate)", _figure),
    _relation("labor", "labor force", f"{_ECO} > Labor force", _figure),
    _relation("import", "main import", f"{_ECO} > Imports - commodities", read_first(r",|\s\(\d{4}")),
    _relation("crop", "main agricultural product", f"{_ECO} > Agricultural products",
              read_first(r",|\s\(\d{4}")),
    _relation("mean-elevation", "mean elevation", f"{_GEO} > Elevation > mean elevation", read_number(" m")),
    _relation("irrigated", "area of irrigated land", f"{_GEO} > Irrigated land", read_number(" sq km")),
    _relation("internet-users", "share of internet users",
              "Communications > Internet users > percent of population", _figure),
)  # fmt: skip


@dataclass(frozen=True)
class Link:
    """A relation whose value is another country: the step from one country to the next."""

    key: str
    phrase: Callable[[str], str]
    relation: Relation


LINKS: tuple[Link, ...] = (
    Link("export-partner", lambda name: f"largest export partner of {name}",
         _relation("export-partner", "largest export partner", f"{_ECO} > Exports - partners", _partner)),
    Link("import-partner", lambda name: f"largest import partner of {name}",
         _relation("import-partner", "largest import partner", f"{_ECO} > Imports - partners", _partner)),
    Link("former-ruler", lambda name: f"country from which {name} became independent",
         _relation("former-ruler", "country of independence", f"{_GOV} > Independence", _former_ruler)),
    Link("only-neighbour", lambda name: f"only country that shares a land border with {name}",
         _relation("only-neighbour", "only neighbour", f"{_GEO} > Land boundaries > border countries",
                   _only_neighbour)),
)  # fmt: skip
