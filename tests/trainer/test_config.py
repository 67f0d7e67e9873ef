"""Recipes: every one loads, what is written reads back equal, and a mistake is one clear line with exit code 2."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from envs.errors import UserError
from trainer import run
from trainer.algorithm import AlgorithmConfig, LearnerConfig, OptimizerConfig
from trainer.config import load_config, recipe_names, write_config

EVERY_MODEL = ["model.path=some/model"]


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_reads_back_equal_from_its_resolved_form(name: str, tmp_path: Path) -> None:
    config = load_config(name, EVERY_MODEL)
    write_config(config, tmp_path / "config.toml")
    assert load_config(str(tmp_path / "config.toml")) == config


def test_recipes_reach_their_algorithms() -> None:
    expected = {
        "tiny": dict(alpha=1.0, memory_baseline="full", memory_pool="group"),
        "grpo": dict(alpha=0.0),
        "dr-grpo": dict(alpha=0.0, outcome_scale="none"),
        "dapo": dict(alpha=0.0, drop_groups_without_signal=True),
        "gspo": dict(alpha=0.0),
        "rloo": dict(outcome_baseline="leave_one_out", outcome_scale="none"),
        "mempo-none": dict(memory_baseline="none", alpha=1.0),
        "mempo-previous": dict(memory_baseline="previous", alpha=1.0),
        "mempo-turn": dict(memory_pool="turn", alpha=1.0),
        "two-loss": dict(separate_memory_loss=True),
        "ppo": dict(advantage="critic"),
        "imitation": dict(alpha=0.0, outcome_baseline="none", outcome_scale="none"),
        "qwen2.5-7b-mempo": dict(alpha=1.0, memory_pool="group", memory_baseline="full"),
        "gemma3-270m-gpu-mempo": dict(alpha=1.0, memory_pool="group", memory_baseline="full"),
        "gemma3-270m-gpu-grpo": dict(alpha=0.0),
    }
    for name, settings in expected.items():
        algorithm = load_config(name, EVERY_MODEL).algorithm
        assert {key: getattr(algorithm, key) for key in settings} == settings, name
    mempo, grpo = (load_config(f"gemma3-270m-gpu-{name}", EVERY_MODEL) for name in ("mempo", "grpo"))
    assert mempo.cold_start.source == "imitate" and mempo.steps == grpo.steps == 50
    assert grpo.model_copy(update={"recipe": mempo.recipe, "algorithm": mempo.algorithm}) == mempo
    paper = load_config("qwen2.5-7b-mempo", EVERY_MODEL)
    assert paper.learner.optimizer.lr == 1e-6 and paper.learner.aggregation == "trajectory"
    assert (paper.rollout.questions_per_step, paper.rollout.group_size, paper.learner.epochs) == (128, 16, 1)
    assert load_config("gspo").learner.ratio == "sequence"
    assert load_config("dapo").learner.clip_high == 0.28 and load_config("dapo").learner.kl_coef == 0.0


# What the paper or its walk-through states, by table of the recipe; all else there must be marked.
STATED = {
    "rollout": dict(questions_per_step=128, group_size=16),
    "algorithm": dict(
        advantage="group",
        alpha=1.0,
        outcome_baseline="mean",
        outcome_scale="std",
        memory_baseline="full",
        memory_pool="group",
        memory_scale="std",
        memory_min_pool=1,
        separate_memory_loss=False,
    ),
    "learner": dict(epochs=1, aggregation="trajectory", ratio="token"),
    "learner.optimizer": dict(lr=1e-6),
    "evaluation": dict(objectives=[2, 4, 6, 8, 10]),
}
# Numbers that only another setting gives a meaning, or that have no value.
LEFT_OUT = {"constant_length", "importance_cap", "mini_batch_questions", "lora", "critic", "optimizer"} | {
    "total_steps",
    "floor",
    "muon_lr",
    "muon_momentum",
    "muon_weight_decay",
}


def test_the_papers_recipe_has_its_values_and_marks_every_other_one() -> None:
    text = (Path(run.__file__).parent / "recipes" / "qwen2.5-7b-mempo.toml").read_text()
    table, lines = "", dict[str, dict[str, tuple[object, str]]]()
    for line in text.splitlines():
        if line.startswith("["):
            table = line.strip("[]")
        elif "=" in line and not line.startswith("#"):
            key, value = next(iter(tomllib.loads(line).items()))
            lines.setdefault(table, {})[key] = (value, line.partition("#")[2])
    for name, stated in STATED.items():
        for key, value in stated.items():
            assert lines[name][key][0] == value, key
    for name in ("rollout", "learner", "learner.optimizer", "algorithm", "evaluation"):
        for key, (_, comment) in lines[name].items():
            if key not in STATED[name]:
                assert "[choice]" in comment, f"{name}.{key} is neither stated nor marked"
    for name, model in (
        ("algorithm", AlgorithmConfig),
        ("learner", LearnerConfig),
        ("learner.optimizer", OptimizerConfig),
    ):
        assert set(lines[name]) == set(model.model_fields) - LEFT_OUT, "a default that nobody sees"
    kwargs = load_config("qwen2.5-7b-mempo", EVERY_MODEL).environment[0].kwargs
    assert (kwargs["objectives"], kwargs["max_turns"], kwargs["context"]) == (2, 16, "previous")
    assert "em (every" in text or "(em)" in text


def test_overrides_are_typed_and_reach_nested_values() -> None:
    config = load_config(
        "tiny",
        [
            "learner.optimizer.lr=1e-3",
            "environment.0.kwargs.topk=2",
            "model.prompt=paper",
            "rollout.group_size=4",
        ],
    )
    assert config.learner.optimizer.lr == 1e-3
    assert config.environment[0].kwargs["topk"] == 2
    assert config.environment[0].kwargs["tasks"] == "factbook-tiny:train"
    assert config.model.prompt == "paper" and config.rollout.group_size == 4


@pytest.mark.parametrize(
    ("recipe", "overrides", "said"),
    [
        ("tinny", [], "did you mean 'tiny'"),
        ("no/such/file.toml", [], "does not exist"),
        ("tiny", ["learner.clip_lo=0.1"], "did you mean 'clip_low'"),
        ("tiny", ["modle.path=x"], "did you mean 'model'"),
        ("tiny", ["rollout.group_size=0"], "rollout.group_size"),
        ("tiny", ["rollout.top_p=0.9"], "unknown key 'rollout.top_p'"),
        ("tiny", ["learner.temperature=0.5"], "divide by what the sampler divided by"),
        ("tiny", ["cold_start.source=none"], "model.path is empty"),
        ("tiny", ["cold_start.source=imitate"], "model.path is empty"),
        ("tiny", ["algorithm.advantage=critic"], "learner.critic go together"),
        ("tiny", ["nonsense"], "section.key=value"),
        ("tiny", ["environment.3.id=x"], "environment is a list of 1"),
    ],
)
def test_a_mistake_is_named(recipe: str, overrides: list[str], said: str) -> None:
    with pytest.raises(UserError) as caught:
        load_config(recipe, overrides)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_broken_toml_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("steps = = 3")
    with pytest.raises(UserError, match="not valid TOML"):
        load_config(str(tmp_path / "bad.toml"))


@pytest.mark.parametrize(
    "arguments",
    [
        ["tinny"],
        ["tiny", "--set", "rolout.group_size=4"],
        ["gemma3-270m", "--model", "no/such/folder", "--data", "no-such.jsonl", "--corpus", "no-such.jsonl"],
        ["tiny", "--resume", "no/such/run"],
    ],
)
def test_the_command_says_what_is_wrong_in_one_line_and_exits_with_2(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    extra = [] if "--resume" in arguments else ["--out", str(tmp_path / "run")]
    assert run.main([*arguments, *extra]) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len([line for line in error if line.startswith("error: ")]) == 1
    assert not any("Traceback" in line for line in error)


def test_missing_data_and_a_malformed_row_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"id": "1", "contents": "Title\\ntext"}\n')
    data = tmp_path / "train.jsonl"
    data.write_text('{"id": "1", "question": "q?", "golden_answers": ["a"]}\n{"id": "2", "question": 7}\n')
    files = ["--data", str(data), "--corpus", str(corpus)]
    overrides = ["--set", 'environment.0.id="mempo/SearchQA-v0"', "--set", "evaluation.objectives=[]"]
    assert (
        run.main(["gemma3-270m", "--model", str(tmp_path), *files, *overrides, "--out", str(tmp_path / "a")])
        == 2
    )
    assert str(tmp_path) in capsys.readouterr().err  # a folder without a model
    shipped = ["--set", "cold_start.source=shipped", "--set", "model.prompt=compact"]
    assert run.main(["gemma3-270m", *shipped, *files, *overrides, "--out", str(tmp_path / "b")]) == 2
    said = capsys.readouterr().err
    assert f"{data}" in said and "line 2" in said.replace(":2", " line 2")
    data.unlink()
    assert run.main(["gemma3-270m", *shipped, *files, *overrides, "--out", str(tmp_path / "c")]) == 2
    assert str(data) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engine", "sglang"], "no server is named: give rollout.sglang.urls (--server URL)"),
        (["--server", "localhost:30000"], "'localhost:30000' is no address; http://host:port is needed"),
        (["--server", "http://a:1", "--launch"], "launch starts a server of its own: give no urls with it"),
        (["--engine", "local", "--server", "http://a:1"], "leave out --server and --launch"),
        (["--set", "rollout.sglang.pause=1"], "unknown key 'rollout.sglang.pause'"),
        (["--server", "http://127.0.0.1:9"], "no SGLang server at http://127.0.0.1:9"),
        (["--launch", "--set", "rollout.sglang.python=/nowhere/python"], "`make sglang-env` makes SGLang's"),
        (["--set", "rollout.engine=vlm", "--server", "http://a:1"], "rollout.engine"),
        (["--engine", "vllm"], "no server is named: give rollout.vllm.url (--server URL)"),
        (["--engine", "vllm", "--launch"], "--engine vllm needs a running one: --server URL"),
        (["--engine", "vllm", "--server", "a:1"], "'a:1' is no address; http://host:port is needed"),
        (["--engine", "vllm", "--server", "http://a:b"], "'http://a:b' is no address"),
        (["--server", "http://[::1"], "'http://[::1' is no address"),
        (["--server", "http://"], "'http://' is no address"),
        (["--engine", "vllm", "--server", "http://a:1", "--server", "http://b:1"], "2 vLLM servers; one"),
        (["--engine", "vllm", "--server", "http://127.0.0.1:9"], "no vLLM server at http://127.0.0.1:9"),
        (["--set", "rollout.vllm.urls=[]"], "unknown key 'rollout.vllm.urls'; did you mean 'url'?"),
        (["--set", "rollout=3", "--server", "http://a:1"], "rollout"),
        (
            ["--engine", "vllm", "--server", "http://a:1", "--set", "learner.old_logprobs=recomputed"],
            "learner.old_logprobs must be 'engine', or learner.importance_cap be set",
        ),
    ],
)
def test_servers_that_are_not_there_are_one_line(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main(["tiny", *arguments, "--out", str(tmp_path / "run")]) == 2
    error = [line for line in capsys.readouterr().err.splitlines() if line]
    assert len(error) == 1 and error[0].startswith("error: ") and message in error[0]


def test_a_named_server_or_a_launch_chooses_the_engine() -> None:
    parse = run._parser().parse_args
    _, config, _ = run._choose(parse(["tiny", "--server", "http://a:1", "--server", "http://b:1"]))
    assert (config.rollout.engine, config.rollout.sglang.urls) == ("sglang", ("http://a:1", "http://b:1"))
    _, config, _ = run._choose(parse(["tiny", "--launch"]))
    assert config.rollout.engine == "sglang" and config.rollout.sglang.launch
    assert run._choose(parse(["tiny"]))[1].rollout.engine == "local"
    for said in (["--engine", "vllm"], ["--set", "rollout.engine=vllm"]):
        _, config, _ = run._choose(parse(["tiny", *said, "--server", "http://a:1"]))
        assert (config.rollout.engine, config.rollout.vllm.url) == ("vllm", "http://a:1")
        assert config.rollout.sglang.urls == ()
    capped = ["learner.old_logprobs=recomputed", "learner.importance_cap=2"]
    assert load_config("tiny", [*capped, "rollout.engine=vllm", "rollout.vllm.url=http://a:1"])


def test_a_resumed_run_may_sample_elsewhere_and_changes_in_nothing_else(tmp_path: Path) -> None:
    parse = run._parser().parse_args
    written = load_config("tiny", ["rollout.engine=sglang", "rollout.sglang.launch=true"])
    write_config(written, tmp_path / "config.toml")
    resume = ["--resume", str(tmp_path)]
    _, config, resumed = run._choose(parse([*resume, "--server", "http://a:1"]))
    assert resumed and config.rollout.sglang.urls == ("http://a:1",) and not config.rollout.sglang.launch
    assert config.model_copy(update={"rollout": written.rollout}) == written
    assert run._choose(parse([*resume, "--engine", "local"]))[1].rollout.engine == "local"
    write_config(
        load_config("tiny", ["rollout.engine=vllm", "rollout.vllm.url=http://a:1"]), tmp_path / "config.toml"
    )
    assert run._choose(parse(resume))[1].rollout.vllm.url == "http://a:1"
    moved = run._choose(parse([*resume, "--server", "http://b:1"]))[1].rollout
    assert (moved.engine, moved.vllm.url) == ("vllm", "http://b:1")
    launched = run._choose(parse([*resume, "--engine", "sglang", "--launch"]))[1].rollout
    assert launched.engine == "sglang" and launched.sglang.launch
    with pytest.raises(UserError, match="no option changes it but where tokens come from"):
        run._choose(parse([*resume, "--seed", "2", "--server", "http://a:1"]))
