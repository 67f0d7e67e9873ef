"""docs/environments.md is true: its programs run, and every name in its tables exists."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import envs
from envs.base import MemoryEnv
from envs.retrieval import load_retriever
from envs.retrieval.dense import SETTINGS
from envs.retrieval.providers import PROVIDERS
from envs.tasks.forms import FORMS

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "environments.md").read_text(encoding="utf-8")
PROGRAMS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def rows(heading: str) -> list[list[str]]:
    """The cells of the tables of a section, without their heads."""
    section = TEXT.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [re.split(r"(?<!\\) \| ", line.strip("| ")) for line in lines]


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_programs_run(program: str) -> None:
    names: dict[str, Any] = {"__name__": "docs"}
    exec(compile(program, "docs/environments.md", "exec"), names)
    env = names["env"]
    env.reset(seed=0)
    assert "Doc 1(Title: " in env.step("<search>capital of Poland</search>")[0]


def test_two_programs_were_found() -> None:
    assert len(PROGRAMS) == 2


def test_every_id_is_there_with_its_settings() -> None:
    table = [row for row in rows("Ids") if row[0].startswith("`mempo/")]
    ours = [name for name in envs.list_ids() if name.startswith("mempo/")]  # other tests register their own
    assert sorted(quoted(row[0])[0] for row in table) == ours
    for row in table:
        env = envs.make(quoted(row[0])[0]).unwrapped
        keywords = inspect.signature(type(env).__init__).parameters
        settings = quoted(re.sub(r"\([^)]*\)", "", row[2]))
        assert settings and all(name in keywords for name in settings)
        rewards = re.search(r"`reward` \(([^)]*)\)", row[2])
        assert rewards
        for reward in quoted(rewards[1]):
            envs.make(quoted(row[0])[0], reward=reward)


def test_every_common_setting_is_named() -> None:
    common = set(inspect.signature(MemoryEnv.__init__).parameters) - {"self"}
    assert common <= set(quoted(TEXT.split("\n## Ids\n")[1].split("\n## ")[0]))


def test_every_key_of_info_is_named() -> None:
    env = envs.make("mempo/SearchQA-v0")
    env.reset(seed=0)
    *_, info = env.step("<answer>x</answer>")
    table = [row for row in rows("What the policy reads and writes") if row[0] != "key"]
    assert sorted(name for row in table for name in quoted(row[0])) == sorted(info)
    parse = next(row[1] for row in table if row[0] == "`parse`")
    assert quoted(parse) == list(info["parse"])


def test_every_form_provider_and_setting_is_named() -> None:
    names = {
        *FORMS,
        *(f"web:{name}" for name in PROVIDERS),
        *(provider().key_variable for provider in PROVIDERS.values()),
    }
    assert {name for name in names if f"`{name}`" not in TEXT} == set()
    assert {name for name in SETTINGS if name not in TEXT} == set()
    assert load_retriever("factbook-tiny").search(["Poland"], 1)[0]
