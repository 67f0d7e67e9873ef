"""A supervised start from any teacher: the loss by hand, the rows, and whole runs on a world of four facts."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from agent.models import load_model, save_model
from agent.prompts import PromptBuilder
from agent.tiny import build_model, build_tokenizer
from envs.errors import UserError
from eval import bench
from tests.trainer.toy import VOCABULARY, qwen
from trainer import run
from trainer.algorithm import OptimizerConfig
from trainer.config import RunConfig, load_config
from trainer.demonstrations import demonstrate, read_demonstrations, write_demonstrations
from trainer.forward import Forward
from trainer.imitate import ImitationRows, imitate, main, step
from trainer.learner import Learner
from trainer.optimizers import build_optimizer
from trainer.row import Row
from trainer.teacher import Episode

FACTS = {
    "Poland": ("Warsaw", "Vistula"),
    "Peru": ("Lima", "Rimac"),
    "Mali": ("Bamako", "Niger"),
    "Oman": ("Muscat", "Darsait"),
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two-hop questions with decompositions, one question nobody knows the way to, passages, a tiny model."""
    folder = tmp_path_factory.mktemp("world")
    passages, rows = [], []
    for number, (country, (capital, river)) in enumerate(FACTS.items()):
        passages += [
            f'"{country}"\nThe capital of {country} is {capital}.',
            f'"{capital}"\n{capital} is on {river}.',
        ]
        steps = [
            {"question": f"capital of {country}", "answer": capital},
            {"question": "river of #1", "answer": river},
        ]
        rows.append(
            {
                "id": f"q{number}",
                "question": f"Which river is the capital of {country} on?",
                "golden_answers": [river],
                "metadata": {"decomposition": steps} if country != "Oman" else {},
            }
        )
    _write(folder / "train.jsonl", rows)
    _write(folder / "corpus.jsonl", [{"id": str(i), "contents": text} for i, text in enumerate(passages)])
    tokenizer = build_tokenizer([*passages, *(str(row["question"]) for row in rows)] * 5, 400)
    save_model(
        build_model(tokenizer, hidden=32, layers=2, heads=2, context=512, seed=3), tokenizer, folder / "model"
    )
    return folder


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def settings(world: Path, *more: str) -> list[str]:
    small = [
        "threads=1",
        "model.prompt=compact",
        "environment.0.kwargs.topk=1",
        "cold_start.think=false",
        "cold_start.steps=40",
        "cold_start.tokens_per_step=600",
        "cold_start.lora.targets=all-linear",
        "cold_start.optimizer.lr=2e-2",
        "cold_start.optimizer.total_steps=40",
        "rollout.max_new_tokens=32",
        "evaluation.questions=1",
        "evaluation.validation_questions=3",
        "evaluation.every=20",
        f"environment.0.kwargs.tasks={world / 'train.jsonl'}",
        f"environment.0.kwargs.retriever={world / 'corpus.jsonl'}",
        f"evaluation.tasks={world / 'train.jsonl'}",
        f"model.path={world / 'model'}",
    ]
    return [*small, *more]


def configured(world: Path, *more: str) -> RunConfig:
    return load_config("gemma3-270m-imitate", settings(world, *more))


def command(world: Path, out: Path, *more: str) -> int:
    given = [part for value in settings(world, *more) for part in ("--set", value)]
    return main(["gemma3-270m-imitate", "--out", str(out), *given])


def row(prompt: list[int], said: list[int]) -> Row:
    zeros = (0.0,) * len(said)
    return Row(tuple(prompt), tuple(said), (True,) * len(said), zeros, zeros, 0, 0, 0)


@pytest.mark.parametrize("budget", [1, 10, 1000])
def test_the_loss_is_the_mean_over_the_teachers_tokens_and_so_is_its_gradient(budget: int) -> None:
    rows = [row([1, 2, 3], [4, 5]), row([6], [7, 8, 9, 10, 11]), row([1, 2, 3, 4, 5, 6], [0])]
    model, plain = qwen(1), qwen(1)
    optimizer = build_optimizer(model, OptimizerConfig(lr=1e-3, max_grad_norm=1e9))
    found = step(Forward(model), optimizer, rows, budget)

    losses = []
    for each in rows:
        ids = torch.tensor([[*each.prompt_ids, *each.completion_ids]])
        logprobs = plain(ids).logits.double().log_softmax(-1)[0]
        for place in range(len(each.prompt_ids), ids.shape[1]):
            losses.append(-logprobs[place - 1, ids[0, place]])
    expected = sum(losses) / 8
    assert found == pytest.approx(float(expected.detach()), rel=1e-9)
    assert 1 < found < 3 * math.log(VOCABULARY)
    expected.backward()
    # The first step of AdamW moves every weight by lr against the sign of its gradient (eps aside).
    start = dict(qwen(1).named_parameters())
    for (name, moved), reference in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert reference.grad is not None
        strong = reference.grad.abs() > 1e-5
        assert strong.any(), name
        change = (moved - start[name])[strong]
        torch.testing.assert_close(change, -1e-3 * reference.grad[strong].sign(), rtol=2e-3, atol=0)


def test_a_step_that_is_not_finite_leaves_the_weights(tmp_path: Path) -> None:
    model = qwen(1)
    optimizer = build_optimizer(model, OptimizerConfig(lr=1e-3))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    norm = model.model.norm.weight
    norm.register_hook(lambda gradient: gradient * float("inf"))
    with pytest.raises(UserError, match=r"gradient of norm (inf|nan)"):
        step(Forward(model), optimizer, [row([1, 2, 3], [4, 5])], 100)
    assert all(parameter.equal(before[name]) for name, parameter in model.named_parameters())


EPISODE = Episode(
    question="Who?",
    gold_answer="Ann",
    turns=(
        ("Question: Who?", "<mem>none</mem><search>who</search>"),
        ("Seen: Ann", "<mem>Ann</mem><answer>Ann</answer>"),
    ),
    information=("<information>Ann</information>", ""),
    memories=("none", "Ann"),
    names=(),
)


def test_rows_are_the_rollouts_prompts_and_the_teachers_words(world: Path) -> None:
    tokenizer = load_model(world / "model").tokenizer
    prompts = PromptBuilder(tokenizer, "Rules.")
    rows = ImitationRows([EPISODE, EPISODE], [prompts])
    drawn = [each for batch in rows.batches(4, 1) for each in batch]
    assert len(rows) == 4 and sorted((r.question, r.turn) for r in drawn) == [(0, 1), (0, 2), (1, 1), (1, 2)]
    for each in drawn:
        seen, said = EPISODE.turns[each.turn - 1]
        assert tokenizer.decode(each.prompt_ids) == (
            f"<|im_start|>system\nRules.<|im_end|>\n<|im_start|>user\n{seen}<|im_end|>\n<|im_start|>assistant\n"
        )
        assert tokenizer.decode(each.completion_ids) == said and all(each.sampled)
    again = [each for batch in ImitationRows([EPISODE, EPISODE], [prompts]).batches(4, 1) for each in batch]
    assert again == drawn
    assert sum(r.length for r in next(rows.batches(1, 500))) >= 500


def test_rows_that_do_not_fit_are_left_out_and_counted(world: Path) -> None:
    prompts = PromptBuilder(load_model(world / "model").tokenizer)
    lengths = sorted(r.length for batch in ImitationRows([EPISODE], [prompts]).batches(2, 1) for r in batch)
    assert lengths[0] < lengths[1]
    short = ImitationRows([EPISODE], [prompts], limit=lengths[0])
    assert (len(short), short.left_out) == (1, 1)
    with pytest.raises(UserError, match="no turn"):
        ImitationRows([EPISODE], [prompts], limit=5)


def test_a_turn_in_which_nothing_was_said_is_left_out(world: Path) -> None:
    (first, second) = EPISODE.turns
    silent = replace(EPISODE, turns=((first[0], ""), second))
    rows = ImitationRows([silent], [PromptBuilder(load_model(world / "model").tokenizer)])
    assert (len(rows), rows.left_out) == (1, 1)
    assert all(r.trained_tokens for batch in rows.batches(3, 1) for r in batch)


def test_scoring_contexts_take_the_place_of_turns(world: Path) -> None:
    tokenizer = load_model(world / "model").tokenizer
    rows = ImitationRows([EPISODE], [PromptBuilder(tokenizer)], scoring=1.0)
    drawn = [each for batch in rows.batches(2, 1) for each in batch]
    assert len(drawn) == 4  # for both turns: from the transcript, and from the memory alone
    assert {tokenizer.decode(r.completion_ids) for r in drawn} == {"Ann</answer>"}
    assert all(tokenizer.decode(r.prompt_ids).endswith("<|im_start|>assistant\n<answer>") for r in drawn)


def test_the_expert_plays_what_it_knows_the_way_to(world: Path, tmp_path: Path) -> None:
    episodes, counts = demonstrate(configured(world))
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
    again, _ = demonstrate(configured(world, f"cold_start.teacher={tmp_path / 'd.jsonl'}"))
    assert again == episodes
    write_demonstrations(tmp_path / "d.jsonl", [replace(episodes[0], environment=1)])
    with pytest.raises(UserError, match="environment 1, and there are 1"):
        demonstrate(configured(world, f"cold_start.teacher={tmp_path / 'd.jsonl'}"))


def test_what_counts_as_right_fits_how_the_environment_pays(world: Path, tmp_path: Path) -> None:
    """Half of the points for an answer: nothing is paid in full; with the least reward at a half all is as before."""
    full, _ = demonstrate(configured(world))

    def half(*more: str) -> tuple[list[Episode], dict[str, int]]:
        config = configured(world, *more).model_dump()
        config["environment"][0]["kwargs"]["reward"] = {"em": 0.5}
        episodes, counts = demonstrate(RunConfig.model_validate(config), tmp_path / "teacher")
        return episodes, dict(counts)

    with pytest.raises(
        UserError, match=r"no right episode \(played 3, unknown 1\), none of at least 1 reward"
    ):
        half()
    assert half("cold_start.right_reward=0.5") == (full, {"played": 3, "right": 3, "unknown": 1})


def test_a_run_learns_the_teachers_words_and_leaves_what_it_says(world: Path, tmp_path: Path) -> None:
    assert command(world, tmp_path / "out") == 0
    rows = [json.loads(line) for line in (tmp_path / "out" / "imitation.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rows] == list(range(41))
    losses = [r["loss"] for r in rows[1:]]
    assert losses[-1] < 0.7 * losses[0]
    measured = {r["step"]: r["validation/valid_turns"] for r in rows if "validation/valid_turns" in r}
    assert set(measured) == {0, 20, 40} and measured[0] == 0.0
    assert (tmp_path / "out" / "imitation.png").read_bytes().startswith(b"\x89PNG")
    assert len(read_demonstrations(tmp_path / "out" / "demonstrations.jsonl")) == 3
    start = load_file(world / "model" / "model.safetensors")
    after = load_file(tmp_path / "out" / "model" / "model.safetensors")
    assert start.keys() == after.keys()  # adapters are merged
    moved = {key for key in start if not start[key].equal(after[key])}
    assert moved == {key for key in start if key.endswith("_proj.weight")}
    assert command(world, tmp_path / "out") == 2  # it is not overwritten


def test_it_learns_to_play_and_a_training_run_starts_with_it(world: Path, tmp_path: Path) -> None:
    more = ["steps=1", "cold_start.steps=250", "cold_start.optimizer.total_steps=250", "evaluation.every=250"]
    more += ["cold_start.optimizer.lr=3e-3", "rollout.questions_per_step=2", "rollout.group_size=2"]
    config = configured(world, *more).model_dump(exclude_none=True)
    del config["cold_start"]["lora"]  # all weights
    trained = RunConfig.model_validate(config)
    run.run_folder(trained, tmp_path / "run")
    rows = [
        json.loads(s) for s in (tmp_path / "run" / "imitation" / "imitation.jsonl").read_text().splitlines()
    ]
    measured = [r["validation/valid_turns"] for r in rows if "validation/valid_turns" in r]
    assert measured[0] == 0.0 and measured[-1] >= 0.8
    kept = load_model(tmp_path / "run" / "cold_start")
    assert kept.fingerprint != load_model(world / "model").fingerprint
    assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text())["step"] == 1


def test_adapters_leave_a_model_that_can_be_trained_as_a_whole(world: Path) -> None:
    """As one that is loaded from the disk, which is what a resumed run starts with."""
    config = configured(world, "cold_start.steps=1", "evaluation.every=0")
    assert config.cold_start.lora is not None and config.learner.lora is None
    trained = imitate(load_model(world / "model"), [EPISODE], config)
    assert all(parameter.requires_grad for parameter in trained.model.parameters())
    learner = Learner(trained.model, config.learner)
    assert learner.optimizer.parameters.keys() == dict(trained.model.named_parameters()).keys()


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


def test_a_large_model_behind_an_endpoint_teaches(world: Path, tmp_path: Path, endpoint: str) -> None:
    more = [f"cold_start.teacher={endpoint}", "cold_start.teacher_model=large"]
    given = [part for value in settings(world, *more) for part in ("--set", value)]
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
    recorded, counts = demonstrate(configured(world, f"cold_start.teacher=recorded:{out / 'teacher'}"))
    assert recorded == episodes and counts["played"] == 4 and counts["right"] == 3


def test_a_right_answer_without_a_memory_is_not_imitated(
    world: Path, tmp_path: Path, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Endpoint, "forgetful", "Peru")
    more = [f"cold_start.teacher={endpoint}", "cold_start.teacher_model=large"]
    episodes, counts = demonstrate(configured(world, *more), tmp_path / "teacher")
    assert sorted(episode.gold_answer for episode in episodes) == ["Darsait", "Vistula"]
    assert dict(counts) == {"played": 4, "right": 3, "without_memory": 1}


def test_episodes_go_to_the_environment_that_they_were_played_in(
    world: Path, tmp_path: Path, endpoint: str
) -> None:
    """Two environments over the same questions; the second one is too short to answer any."""
    config = configured(world, f"cold_start.teacher={endpoint}", "cold_start.teacher_model=large")
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
    base = ["--data", str(world / "train.jsonl"), "--corpus", str(world / "corpus.jsonl")]
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


def test_an_environment_that_breaks_fails_its_episode_only(world: Path) -> None:
    def rewarded(name: str) -> list[Episode]:
        config = configured(world).model_dump(exclude_none=True)
        config["environment"][0]["kwargs"]["reward"] = f"{__name__}:{name}"
        episodes, counts = demonstrate(RunConfig.model_validate(config))
        assert dict(counts) == {"played": 3, "right": 2, "failed": 1, "unknown": 1}
        return episodes

    assert {episode.gold_answer for episode in rewarded("judged_by_mood")} == {"Rimac", "Niger"}
    with pytest.raises(UserError, match=r"failed 3.*the first failure: RewardError: .*nobody knows"):
        rewarded("broken")


def test_a_recording_that_goes_another_way_teaches_nothing(
    world: Path, tmp_path: Path, endpoint: str
) -> None:
    base = ["--data", str(world / "train.jsonl"), "--corpus", str(world / "corpus.jsonl")]
    base += ["--env-arg", "topk=1"]
    ask = ["--endpoint", endpoint, "--endpoint-model", "large", "--env-arg", "max_turns=4"]
    assert bench.main([*base, *ask, "--out", str(tmp_path / "played")]) == 0
    teacher = f"cold_start.teacher=recorded:{tmp_path / 'played'}"
    episodes, counts = demonstrate(configured(world, teacher))
    assert len(episodes) == 3 and counts["different"] == 0
    with pytest.raises(UserError, match="different 3"):
        demonstrate(configured(world, teacher, "environment.0.kwargs.max_turns=2"))
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


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["cold_start.teacher=expret"], "none of"),
        (["cold_start.teacher=http://127.0.0.1:9/v1"], "teacher_model"),
        (["cold_start.teacher=random"], "no right episode (played 4)"),
        (["cold_start.teacher=no/such.jsonl"], "does not exist"),
        (["cold_start.teacher=recorded:no/run"], "no evaluation run"),
        (["rollout.max_prompt_tokens=16"], "no turn of the demonstrations fits"),
        (["environment.0.kwargs.max_turns=1"], "no right episode"),
    ],
)
def test_mistakes_are_one_line(
    world: Path, tmp_path: Path, overrides: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(world, tmp_path / "out", *overrides) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and said in errors[0]


def test_an_interruption_is_one_line(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("trainer.imitate.imitate", interrupt)
    assert command(world, tmp_path / "out") == 130
    assert (
        capsys.readouterr()
        .err.splitlines()[-1]
        .startswith("interrupted; the same command begins the steps anew")
    )


@pytest.mark.parametrize("change", [{"turns": []}, {"turns": None}, {"names": 3}, {"memories": ["a"]}])
def test_a_malformed_demonstration_is_named(tmp_path: Path, change: dict[str, Any]) -> None:
    write_demonstrations(tmp_path / "d.jsonl", [EPISODE])
    good = json.loads((tmp_path / "d.jsonl").read_text())
    _write(tmp_path / "d.jsonl", [good, {**good, **change}])
    with pytest.raises(UserError, match="line 2: no demonstration"):
        read_demonstrations(tmp_path / "d.jsonl")
