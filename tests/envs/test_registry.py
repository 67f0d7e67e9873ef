"""Ids, plug-ins and what is said about unknown ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import gymnasium
import pytest

import envs
from envs.errors import UserError
from envs.multi_objective import MultiObjectiveQA

ROOT = Path(__file__).resolve().parents[2]


def test_the_missions_ids_are_known_to_both() -> None:
    for id in ("mempo/SearchQA-v0", "mempo/MultiObjectiveQA-v0"):
        assert id in envs.list_ids() and id in gymnasium.registry


def test_make_takes_the_environments_keywords() -> None:
    env = envs.make("mempo/MultiObjectiveQA-v0", objectives=4, max_turns=5)
    base = env.unwrapped
    assert isinstance(base, MultiObjectiveQA) and (base.objectives, base.max_turns) == (4, 5)


def test_specs_survive_json() -> None:
    for id in envs.list_ids():
        spec = gymnasium.envs.registration.EnvSpec.from_json(gymnasium.spec(id).to_json())
        assert spec.entry_point == gymnasium.spec(id).entry_point
        assert type(gymnasium.make(spec).unwrapped) is type(envs.make(id).unwrapped)


@pytest.mark.parametrize(
    ("id", "message"),
    [
        ("mempo/SerchQA-v0", r"unknown environment 'mempo/SerchQA-v0'; did you mean 'mempo/SearchQA-v0'\?"),
        ("searchqa", "unknown environment 'searchqa'"),
        ("no_such_package_x:mempo/SearchQA-v0", "no package 'no_such_package_x'"),
        ("", "unknown environment ''"),
    ],
)
def test_unknown_ids(id: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        envs.make(id)


def test_unknown_keywords_are_named_with_the_closest() -> None:
    with pytest.raises(
        UserError, match=r"has no setting 'objectivs'; did you mean 'objectives'\?.*max_turns"
    ):
        envs.make("mempo/MultiObjectiveQA-v0", objectivs=2)


def test_registering_twice() -> None:
    envs.register("mempo/SearchQA-v0", "envs.search_qa:SearchQA")
    with pytest.raises(UserError, match=r"taken by envs\.search_qa:SearchQA"):
        envs.register("mempo/SearchQA-v0", "other.module:Other")
    for id in ("SearchQA-v0", "mempo/SearchQA", "mempo/Search QA-v0", "a/b/C-v0"):
        with pytest.raises(UserError, match="the form 'namespace/Name-v0' is needed"):
            envs.register(id, "a:B")
    with pytest.raises(UserError, match=r"a text 'package\.module:Class' is needed"):
        envs.register("mempo/New-v0", MultiObjectiveQA)  # type: ignore[arg-type]


PLUGINS = {
    "good_plugin.py": "from envs.search_qa import SearchQA\nclass Mine(SearchQA): pass\n",
    "self_registering.py": "import envs\nenvs.register('plug/Self-v0', 'good_plugin:Mine')\n",
    "broken_plugin.py": "raise ImportError('a part of me is missing')\n",
    "plug-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: plug\nVersion: 1.0\n",
    "plug-1.0.dist-info/entry_points.txt": (
        "[mempo.envs]\nplug/Mine-v0 = good_plugin:Mine\nplug/Lazy-v0 = broken_plugin:Nothing\n"
        "module = self_registering\nbroken = broken_plugin\n"
    ),
}
SCRIPT = """
import sys, warnings
import envs
assert not {'good_plugin', 'self_registering', 'broken_plugin'} & set(sys.modules), 'not lazy'
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter('always')
    ids = envs.list_ids()
print([id for id in ids if id.startswith('plug/')])
print([str(warning.message) for warning in caught])
print(type(envs.make('plug/Mine-v0').unwrapped).__name__, type(envs.make('plug/Self-v0').unwrapped).__name__)
print(type(envs.make('good_plugin:mempo/SearchQA-v0').unwrapped).__name__)
assert not {'torch', 'ray', 'transformers'} & set(sys.modules)
"""


def test_plugins_are_lazy_and_a_broken_one_breaks_nothing_else(tmp_path: Path) -> None:
    for name, text in PLUGINS.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))}
    command = [sys.executable, "-c", SCRIPT]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        "['plug/Lazy-v0', 'plug/Mine-v0', 'plug/Self-v0']",
        "[\"environment plug-in 'broken' (broken_plugin) is left out: ImportError: a part of me is "
        'missing"]',
        "Mine Mine",
        "SearchQA",
    ]
