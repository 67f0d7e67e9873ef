"""The README's environment runs exactly as it is printed."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import gymnasium
import pytest

from envs.check import check_env

README = Path(__file__).parents[1] / "README.md"


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Source of the environment, importable as the module ``lock``."""
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(blocks) == 1, "the README shows one environment"
    (tmp_path / "lock.py").write_text(blocks[0], encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "lock", raising=False)
    return str(blocks[0])


def test_the_environment_is_small(example: str) -> None:
    assert len(example.strip().splitlines()) <= 40


def test_the_environment_passes_the_checks_and_can_be_won(example: str) -> None:
    env = gymnasium.make("lock:my/Lock-v0")
    check_env("lock:my/Lock-v0")
    _, info = env.reset(seed=3)
    code = env.unwrapped.task.golds[0][0]  # type: ignore[attr-defined]
    memory = ""
    for place in range(1, 5):
        call = f'<tool_call>{{"name": "listen", "arguments": {{"place": "{place}"}}}}</tool_call>'
        observation, reward, terminated, truncated, info = env.step(f"<mem>{memory or 'nothing'}</mem>{call}")
        assert not terminated and not truncated and reward == 0
        assert code not in observation
        memory += info["information"].removesuffix(".")[-1]
        assert memory[-1] == code[place - 1]
    _, reward, terminated, _, info = env.step(f"<mem>{memory}</mem><answer>{memory}</answer>")
    assert terminated and reward == 1.0 and info["scores"]["em"] == 1.0
