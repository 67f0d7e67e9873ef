"""Learning curves as pictures, from the rows of ``metrics.jsonl`` alone."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Rows = Sequence[Mapping[str, Any]]
"""Rows of a run: ``step`` and metrics by name; a metric may be missing or None in some of them."""

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's, told apart also without seeing red or green."""

Panel = tuple[str, Mapping[str, str], tuple[float, float] | None]
"""Title, metric by name with its label, limits of the axis."""

PANELS: tuple[Panel, ...] = (
    ("outcome", {"reward/mean": "reward", "score/em": "EM", "score/f1": "F1"}, (0.0, 1.0)),
    ("memory", {"memory/p_mem": "P_mem", "memory/p_full": "P_full", "memory/r_mem": "R_M"}, None),
    ("tokens an episode", {"tokens/total": "total", "tokens/peak": "peak"}, None),
)
"""What a run's picture shows."""


_MEASURED = {"validation/valid_turns": "valid turns", "validation/em": "EM", "validation/f1": "F1"}
IMITATION: tuple[Panel, ...] = (
    ("loss, nats a token", {"loss": "teacher's words"}, None),
    (
        "greedy, held-out questions",
        _MEASURED,
        (0.0, 1.0),
    ),
)
"""What the picture of a supervised start shows."""


def plot_imitation(rows: Rows, path: str | Path, title: str = "") -> None:
    """A supervised start: loss by step (raw behind smoothed), and what was measured on held-out questions now and then.

    Raises:
        ValueError: no rows.
    """
    _plot_panels(rows, IMITATION, path, title, weight=0.9, rare=_MEASURED)


def plot_run(rows: Rows, path: str | Path, title: str = "") -> None:
    """One run: outcome, memory scores and tokens an episode by step, raw values behind a smoothed line.

    Raises:
        ValueError: no rows.
    """
    _plot_panels(rows, PANELS, path, title)


def _plot_panels(
    rows: Rows,
    panels: Sequence[Panel],
    path: str | Path,
    title: str,
    weight: float = 0.7,
    rare: Collection[str] = (),
) -> None:
    """Panels side by side; ``rare`` metrics are points on a line, the others smoothed."""
    if not rows:
        raise ValueError("no rows: nothing to draw")
    figure, axes = _figure(len(panels), title)
    for axis, (name, metrics, limits) in zip(axes, panels, strict=True):
        for colour, (key, label) in zip(COLOURS, metrics.items(), strict=False):
            steps, values = series(rows, key)
            if not steps:
                continue
            if key in rare:
                axis.plot(steps, values, "o-", color=colour, linewidth=2, markersize=4, label=label)
            else:
                axis.plot(steps, values, color=colour, alpha=0.25, linewidth=1)
                axis.plot(steps, smooth(values, weight), color=colour, linewidth=2, label=label)
        _finish(axis, name, limits)
    _save(figure, path)


def plot_arms(
    arms: Mapping[str, Sequence[Rows]],
    keys: Mapping[str, str],
    path: str | Path,
    title: str = "",
    along: str = "step",
) -> None:
    """Several settings, several seeds each: mean over seeds, with the range from the lowest to the highest.

    Args:
        arms: runs by the name of their setting.
        keys: metric by name -> title of its panel.
        along: what ``step`` in the rows counts; the label of the axis.

    Raises:
        ValueError: no arms or no keys.
    """
    if not arms or not keys:
        raise ValueError("no arms or no metrics: nothing to draw")
    figure, axes = _figure(len(keys), title)
    for axis, (key, name) in zip(axes, keys.items(), strict=True):
        for number, (arm, runs) in enumerate(arms.items()):
            colour = COLOURS[number % len(COLOURS)]
            steps, low, mean, high = spread([series(rows, key) for rows in runs])
            if not steps:
                continue
            style = "-" if number < len(COLOURS) else "--"
            axis.plot(steps, mean, style, color=colour, linewidth=2, label=f"{arm} (n={len(runs)})")
            axis.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
        _finish(axis, name, None, along)
    _save(figure, path)


def series(rows: Rows, key: str) -> tuple[list[int], list[float]]:
    """Steps at which a metric is known, and its values there."""
    known = [(row["step"], float(row[key])) for row in rows if row.get(key) is not None]
    known = [(step, value) for step, value in known if math.isfinite(value)]
    return [step for step, _ in known], [value for _, value in known]


def smooth(values: Sequence[float], weight: float = 0.7) -> list[float]:
    """Exponential moving average without the pull towards its start (divided by the weights so far)."""
    total = norm = 0.0
    smoothed = []
    for value in values:
        total, norm = weight * total + (1 - weight) * value, weight * norm + (1 - weight)
        smoothed.append(total / norm)
    return smoothed


def spread(
    runs: Sequence[tuple[Sequence[int], Sequence[float]]],
) -> tuple[list[int], list[float], list[float], list[float]]:
    """Steps that all runs have, with the lowest, mean and highest smoothed value."""
    curves = [dict(zip(steps, smooth(values), strict=True)) for steps, values in runs]
    steps = sorted(set.intersection(*(set(curve) for curve in curves))) if curves else []
    columns = [[curve[step] for curve in curves] for step in steps]
    return steps, [min(c) for c in columns], [fmean(c) for c in columns], [max(c) for c in columns]


def _figure(panels: int, title: str) -> tuple[Any, list[Axes]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure  # no pyplot: no display, no state between pictures

    figure = Figure(figsize=(4.6 * panels, 3.6), layout="constrained", dpi=120)
    FigureCanvasAgg(figure)
    if title:
        figure.suptitle(title, fontsize=11)
    return figure, list(figure.subplots(1, panels, squeeze=False)[0])


def _finish(axis: Axes, name: str, limits: tuple[float, float] | None, along: str = "step") -> None:
    axis.set_title(name, fontsize=10, loc="left")
    axis.set_xlabel(along, fontsize=9)
    axis.tick_params(labelsize=8)
    axis.grid(alpha=0.25, linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)
    low, high = axis.get_ylim()
    if limits is not None and limits[0] <= low + 0.05 and high - 0.05 <= limits[1]:
        axis.set_ylim(*limits)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=8, frameon=False)
    else:
        axis.text(0.5, 0.5, "not measured", transform=axis.transAxes, ha="center", color="#666666")


def _save(figure: Any, path: str | Path) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None})  # the same rows give the same bytes
