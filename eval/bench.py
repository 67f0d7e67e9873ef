"""`python -m eval.bench`: score models on benchmarks, compare runs, list them.

python -m eval.bench                                     the newest trained model beside its cold start
python -m eval.bench --model FOLDER --data questions.jsonl --corpus corpus.jsonl
python -m eval.bench compare RUN_A RUN_B                 paired interval and p-value
python -m eval.bench leaderboard RUN...                  Markdown and HTML
python -m eval.bench suite mempo-table --model FOLDER    the paper's table beside its published figures
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from envs.errors import UserError
from eval import benchmarks as registry
from eval.commands import (
    add_sampling_options,
    add_subject_options,
    add_task_options,
    chosen_benchmarks,
    settings,
    subjects,
)
from eval.compare import compare_runs, markdown_comparison
from eval.leaderboard import leaderboard, write_leaderboard
from eval.report import COST_HEAD, SCORE_HEAD, cost_row, markdown_table, score_row, write_reports
from eval.scorers import scorer_names
from eval.session import run_session
from eval.store import Run, finished_run, write_json
from eval.suites import load_suite, suite_names

COMMANDS = ("score", "compare", "leaderboard", "suite", "rescore", "list")


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser, score = _parsers()
    if given in (["-h"], ["--help"]):
        print(parser.format_help())
        print("The options of `score`, which is the command when none is named:\n")
        print(score.format_help())
        return 0
    if not given or given[0].startswith("-"):
        given.insert(0, "score")
    options = parser.parse_args(given)
    try:
        options.carry_out(options)
    except (UserError, OSError) as error:
        # An OSError is a folder that cannot be written, a full disk, a file that is none: a person's to mend.
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command goes on", file=sys.stderr)
        return 130
    return 0


def score(options: argparse.Namespace) -> None:
    """Evaluate, print the tables; with a training run also what training changed."""
    if options.rescore is not None:
        _check_scorer(options.rescore)
    benchmarks = chosen_benchmarks(options)
    console = Console(stderr=True)
    runs = [
        run_session(subject, benchmarks, options.out, settings(options), root=root, console=console)
        for subject, root in subjects(options)
    ]
    for run in runs:
        if options.rescore is not None:
            _rescore(run, options.rescore)
    _print_tables(runs, options.rescore)
    if len(runs) == 2:
        before, after = runs
        print(markdown_comparison(before, after, compare_runs(before, after, options.rescore)), end="\n\n")
    for run in runs:
        print(f"{run.name}: {run.path / 'report.html'}")


def compare(options: argparse.Namespace) -> None:
    """Two runs, sample by sample."""
    _check_scorer(options.scorer)
    a, b = finished_run(options.a), finished_run(options.b)
    print(markdown_comparison(a, b, compare_runs(a, b, options.scorer)))


def rank(options: argparse.Namespace) -> None:
    """The leaderboard of some runs."""
    runs = [finished_run(path) for path in options.run_folders]
    suite = load_suite(options.suite) if options.suite else None
    board = leaderboard(runs, options.out, suite)
    write_leaderboard(board, options.out)
    print(board.markdown())
    print(f"{options.out / 'leaderboard.html'}")


def run_suite(options: argparse.Namespace) -> None:
    """Every benchmark of a suite for one model, beside published figures."""
    suite = load_suite(options.suite_name)
    options.benchmark, options.data, options.env = list(suite.benchmarks), None, None
    options.corpus = options.objectives = None
    if options.search is not None:
        options.env_arg = [f'retriever="{options.search}"', *options.env_arg]
    runs: list[Run] = []
    for subject, root in subjects(options):
        runs.append(
            run_session(subject, chosen_benchmarks(options), options.out, settings(options), root=root)
        )
    board = leaderboard(runs, runs[0].path, suite)
    write_leaderboard(board, runs[0].path)
    print(board.markdown())
    print(f"{runs[0].path / 'leaderboard.html'}")


def rescore(options: argparse.Namespace) -> None:
    """Score the samples of a run under another rule; nothing is generated."""
    _check_scorer(options.scorer)
    run = finished_run(options.run_folder)
    _rescore(run, options.scorer)
    _print_tables([run], options.scorer)


def list_benchmarks(options: argparse.Namespace) -> None:
    """What can be evaluated."""
    rows = []
    for name in registry.names():
        benchmark = registry.get(name)
        rows.append((name, str(benchmark.version), benchmark.env, benchmark.description))
    print("\n".join(markdown_table(("benchmark", "version", "environment", "what it is"), rows)))
    print(f"\nsuites: {', '.join(suite_names())}\nscorers: {', '.join(scorer_names())}")


def _rescore(run: Run, scorer: str) -> None:
    write_json(run.path / f"summary.{scorer}.json", run.summaries(scorer))
    write_reports(run, scorer)


def _print_tables(runs: Sequence[Run], scorer: str | None) -> None:
    scores, costs = [], []
    summaries = [run.summaries(scorer) for run in runs]
    for benchmark in dict.fromkeys(name for each in summaries for name in each):
        for run, each in zip(runs, summaries, strict=True):
            if benchmark in each:
                scores.append((benchmark, run.name, *score_row(benchmark, each[benchmark])[1:]))
                costs.append((benchmark, run.name, *cost_row(benchmark, each[benchmark])[1:]))
    print("\n".join(markdown_table((SCORE_HEAD[0], "model", *SCORE_HEAD[1:]), scores)), end="\n\n")
    print("\n".join(markdown_table((COST_HEAD[0], "model", *COST_HEAD[1:]), costs)), end="\n\n")


def _check_scorer(name: str | None) -> None:
    if name is not None and name not in scorer_names():
        raise UserError(f"unknown scorer {name!r} (scorers: {', '.join(scorer_names())})")


def _parsers() -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    parser = argparse.ArgumentParser(
        prog="python -m eval.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    scoring = commands.add_parser("score", help="evaluate (the command when none is named)")
    add_subject_options(scoring)
    add_task_options(scoring)
    scoring.add_argument("--rescore", metavar="RULE", help="score what is there under another rule as well")
    scoring.set_defaults(carry_out=score)

    comparing = commands.add_parser("compare", help="two runs on the same samples: interval and p-value")
    comparing.add_argument("a", type=Path, metavar="RUN_A")
    comparing.add_argument("b", type=Path, metavar="RUN_B")
    comparing.add_argument("--scorer", metavar="RULE", help="a rule for both (default: each run's own)")
    comparing.set_defaults(carry_out=compare)

    ranking = commands.add_parser("leaderboard", help="a table of runs as Markdown and HTML")
    ranking.add_argument("run_folders", type=Path, nargs="+", metavar="RUN")
    ranking.add_argument("--suite", help="add the published figures of a suite as reference rows")
    ranking.add_argument("--out", type=Path, default=Path("runs"), metavar="FOLDER", help="where to (runs)")
    ranking.set_defaults(carry_out=rank)

    suites = commands.add_parser("suite", help="every benchmark of a suite beside published figures")
    suites.add_argument("suite_name", metavar="SUITE", help=f"{', '.join(suite_names())}, or a .toml file")
    suites.add_argument(
        "--search",
        metavar="ADDRESS",
        help=f"search server for all benchmarks, or a corpus file (public sets: {registry.SEARCH_SERVER})",
    )
    add_subject_options(suites)
    add_sampling_options(suites)
    suites.set_defaults(carry_out=run_suite)

    again = commands.add_parser("rescore", help="score a run under another rule without generating again")
    again.add_argument("run_folder", type=Path, metavar="RUN")
    again.add_argument("--scorer", required=True, metavar="RULE", help=", ".join(scorer_names()))
    again.set_defaults(carry_out=rescore)

    commands.add_parser("list", help="all benchmarks, suites and scorers").set_defaults(
        carry_out=list_benchmarks
    )
    return parser, scoring


if __name__ == "__main__":
    sys.exit(main())
