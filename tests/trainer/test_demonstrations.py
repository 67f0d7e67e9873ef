"""Whose episodes are imitated: the expert's, a large model's behind an endpoint, recorded ones; and which of them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from envs.errors import UserError
from eval import bench
from tests.trainer.four_facts import EPISODE, FACTS, configured, settings, write_rows
from trainer.config import RunConfig
from trainer.demonstrations import demonstrate, read_demonstrations, write_demonstrations
from trainer.imitate import main
from trainer.teacher import Episode


def test_the_expert_plays_what_it_knows_the_way_to(four_facts: Path, tmp_path: Path) -> None:
    episodes, counts = demonstrate(configured(four_facts))
    assert dict(counts) == {"played": 3, "right": 3, "unknown": 1}
    poland = next(episode for episode in episodes if "Poland" in episode.question)
    assert [said for _, said in poland.turns] == [
        "<mem>none</mem><search>capital of Poland</search>",
        "<mem>1) see Warsaw</mem><search>river of Warsaw</search>",
        "<mem>1) Vistula</mem><answer>Vistula</answer>",
    ]
    assert "The capital of Poland is Warsaw." in poland.turns[1][0]
    assert set(poland.names) == {"Warsaw", "Vistula"}
    write_demonstrations(tmp_path / "d.jsonl", episodes)
    assert read_demonstrations(tmp_path / "d.jsonl") == episodes
    again, _ = demonstrate(configured(four_facts, f"cold_start.teacher={tmp_path / 'd.jsonl'}"))
    assert again == episodes
    write_demonstrations(tmp_path / "d.jsonl", [replace(episodes[0], environment=1)])
    with pytest.raises(UserError, match="environment 1, and there are 1"):
        demonstrate(configured(four_facts, f"cold_start.teacher={tmp_path / 'd.jsonl'}"))


def test_what_counts_as_right_fits_how_the_environment_pays(four_facts: Path, tmp_path: Path) -> None:
    """Half of the points for an answer: nothing is paid in full; with the least reward at a half all is as before."""
    full, _ = demonstrate(configured(four_facts))

    def half(*more: str) -> tuple[list[Episode], dict[str, int]]:
        config = configured(four_facts, *more).model_dump()
        config["environment"][0]["kwargs"]["reward"] = {"em": 0.5}
        episodes, counts = demonstrate(RunConfig.model_validate(config), tmp_path / "teacher")
        return episodes, dict(counts)

    with pytest.raises(
        UserError, match=r"no right episode \(played 3, unknown 1\), none of at least 1 reward"
    ):
        half()
    assert half("cold_start.right_reward=0.5") == (full, {"played": 3, "right": 3, "unknown": 1})


class Endpoint(BaseHTTPRequestHandler):
    """Chat completions of a model that knows the facts, but not Mali's; the stop string is cut off."""

    asked: list[dict[str, Any]] = []
    forgetful = ""
    """Country of which it writes nothing down."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        seen = body["messages"][-1]["content"]
        country = next(country for country in FACTS if country in seen)
        capital, river = FACTS[country]
        if f"{capital} is on" in seen:
            said = f"<mem>{river}</mem><answer>{'Congo' if country == 'Mali' else river}"
        else:
            said = f"<mem>going on</mem><search>capital of {country}"
            if f"is {capital}" in seen:
                said = f"<mem>{capital}</mem><search>{capital} is on"
        if country == self.forgetful:
            said = said[said.index("</mem>") + len("</mem>") :]
        data = json.dumps(
            {
                "choices": [{"message": {"content": said}, "finish_reason": "stop"}],
                "usage": {"prompt_tokens": 5, "completion_tokens": 5},
            }
        ).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        return


@pytest.fixture
def endpoint() -> Iterator[str]:
    Endpoint.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_large_model_behind_an_endpoint_teaches(four_facts: Path, tmp_path: Path, endpoint: str) -> None:
    more = [f"cold_start.teacher={endpoint}", "cold_start.teacher_model=large"]
    given = [part for value in settings(four_facts, *more) for part in ("--set", value)]
    out = tmp_path / "out"
    assert main(["gemma3-270m-imitate", "--out", str(out), "--only-demonstrations", *given]) == 0
    episodes = read_demonstrations(out / "demonstrations.jsonl")
    # Mali's was wrong; Oman's has no known way, and the endpoint needs none.
    assert sorted(episode.gold_answer for episode in episodes) == ["Darsait", "Rimac", "Vistula"]
    for episode in episodes:
        assert episode.turns[-1][1].endswith(f"<answer>{episode.gold_answer}</answer>")
        assert "<search>" in episode.turns[0][1]
    asked = len(Endpoint.asked)
    assert asked == 12 and {body["model"] for body in Endpoint.asked} == {"large"}
    rules = Endpoint.asked[0]["messages"][0]
    assert rules["role"] == "system" and "<mem>" in rules["content"]  # though its student has no rules
    # The teacher's run is an evaluation run: a second call asks nothing again, and it can be named itself.
    assert main(["gemma3-270m-imitate", "--out", str(out), "--only-demonstrations", *given]) == 0
    assert len(Endpoint.asked) == asked
    recorded, counts = demonstrate(configured(four_facts, f"cold_start.teacher=recorded:{out / 'teacher'}"))
    assert recorded == episodes and counts["played"] == 4 and counts["right"] == 3


def test_a_right_answer_without_a_memory_is_not_imitated(
    four_facts: Path, tmp_path: Path, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Endpoint, "forgetful", "Peru")
    more = [f"cold_start.teacher={endpoint}", "cold_start.teacher_model=large"]
    episodes, counts = demonstrate(configured(four_facts, *more), tmp_path / "teacher")
    assert sorted(episode.gold_answer for episode in episodes) == ["Darsait", "Vistula"]
    assert dict(counts) == {"played": 4, "right": 3, "without_memory": 1}


def test_episodes_go_to_the_environment_that_they_were_played_in(
    four_facts: Path, tmp_path: Path, endpoint: str
) -> None:
    """Two environments over the same questions; the second one is too short to answer any."""
    config = configured(four_facts, f"cold_start.teacher={endpoint}", "cold_start.teacher_model=large")
    data = config.model_dump(exclude_none=True)
    [first] = data["environment"]
    data["environment"] = [first, {**first, "kwargs": {**first["kwargs"], "max_turns": 2}}]
    mixture = RunConfig.model_validate(data)
    episodes, counts = demonstrate(mixture, tmp_path / "teacher")
    assert [episode.environment for episode in episodes] == [0, 0, 0]
    assert dict(counts) == {"played": 8, "right": 3}
    data["cold_start"]["teacher"] = f"recorded:{tmp_path / 'teacher'}"
    assert demonstrate(RunConfig.model_validate(data)) == (episodes, counts)
    # A run that is no teacher's: where the question is asked and the answer paid.
    data["environment"].reverse()
    base = ["--data", str(four_facts / "train.jsonl"), "--corpus", str(four_facts / "corpus.jsonl")]
    ask = ["--endpoint", endpoint, "--endpoint-model", "large", "--env-arg", "topk=1"]
    assert bench.main([*base, *ask, "--out", str(tmp_path / "played")]) == 0
    data["cold_start"]["teacher"] = f"recorded:{tmp_path / 'played'}"
    episodes, counts = demonstrate(RunConfig.model_validate(data))
    assert [episode.environment for episode in episodes] == [1, 1, 1]
    assert dict(counts) == {"played": 4, "right": 3}


def broken(episode: Any) -> float:
    raise ZeroDivisionError("nobody knows")


def judged_by_mood(episode: Any) -> float:
    if "Vistula" in episode.answer:
        raise ZeroDivisionError("nobody knows")
    return 1.0


def test_an_environment_that_breaks_fails_its_episode_only(four_facts: Path) -> None:
    def rewarded(name: str) -> list[Episode]:
        config = configured(four_facts).model_dump(exclude_none=True)
        config["environment"][0]["kwargs"]["reward"] = f"{__name__}:{name}"
        episodes, counts = demonstrate(RunConfig.model_validate(config))
        assert dict(counts) == {"played": 3, "right": 2, "failed": 1, "unknown": 1}
        return episodes

    assert {episode.gold_answer for episode in rewarded("judged_by_mood")} == {"Rimac", "Niger"}
    with pytest.raises(UserError, match=r"failed 3.*the first failure: RewardError: .*nobody knows"):
        rewarded("broken")


def test_a_recording_that_goes_another_way_teaches_nothing(
    four_facts: Path, tmp_path: Path, endpoint: str
) -> None:
    base = ["--data", str(four_facts / "train.jsonl"), "--corpus", str(four_facts / "corpus.jsonl")]
    base += ["--env-arg", "topk=1"]
    ask = ["--endpoint", endpoint, "--endpoint-model", "large", "--env-arg", "max_turns=4"]
    assert bench.main([*base, *ask, "--out", str(tmp_path / "played")]) == 0
    teacher = f"cold_start.teacher=recorded:{tmp_path / 'played'}"
    episodes, counts = demonstrate(configured(four_facts, teacher))
    assert len(episodes) == 3 and counts["different"] == 0
    with pytest.raises(UserError, match="different 3"):
        demonstrate(configured(four_facts, teacher, "environment.0.kwargs.max_turns=2"))
    # By name in an evaluation, too: the same words, the same scores.
    player = ["--player", f"recorded:{tmp_path / 'played'}", "--env-arg", "max_turns=4"]
    assert bench.main([*base, *player, "--out", str(tmp_path / "again")]) == 0
    texts = []
    for name in ("played", "again"):
        lines = (tmp_path / name / "samples.jsonl").read_text().splitlines()
        rows = sorted((json.loads(line) for line in lines), key=lambda sample: sample["id"])
        texts.append([(r["id"], r["answer"], r["reward"], [t["text"] for t in r["turns"]]) for r in rows])
    assert texts[0] == texts[1] and len(texts[0]) == 4
    short = ["--player", f"recorded:{tmp_path / 'played'}", "--env-arg", "max_turns=9"]
    assert bench.main([*base, *short, "--out", str(tmp_path / "longer")]) == 0


@pytest.mark.parametrize("change", [{"turns": []}, {"turns": None}, {"names": 3}, {"memories": ["a"]}])
def test_a_malformed_demonstration_is_named(tmp_path: Path, change: dict[str, Any]) -> None:
    write_demonstrations(tmp_path / "d.jsonl", [EPISODE])
    good = json.loads((tmp_path / "d.jsonl").read_text())
    write_rows(tmp_path / "d.jsonl", [good, {**good, **change}])
    with pytest.raises(UserError, match="line 2: no demonstration"):
        read_demonstrations(tmp_path / "d.jsonl")
