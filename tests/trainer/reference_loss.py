"""The whole update written from the formulas alone: one row at a time, full logits, float64; shares no
code."""

import math
import statistics

import torch


def group_normal(values, scale=True, deviation=statistics.stdev):
    known = [v for v in values if v is not None and not math.isnan(v)]
    if len(known) < 2 or max(known) == min(known):
        return [0.0] * len(values)
    mean, std = statistics.mean(known), deviation(known) + 1e-6 if scale else 1.0
    return [0.0 if v is None or math.isnan(v) else (v - mean) / std for v in values]


def memory_signal(question, how):
    """A_M by trajectory and turn: R_M = P_mem less a baseline, normalised over the group or by turn."""
    scores = []
    for turns in question.trajectories:
        before = turns[0].p_full if turns else 0.0
        for t, turn in enumerate(turns):
            less = {"full": turn.p_full, "none": 0.0, "previous": before}[how.get("memory_baseline", "full")]
            scores.append((t, None if turn.p_mem is None else turn.p_mem - less))
            before = turns[0].p_full if turn.p_mem is None else turn.p_mem
    pools = sorted({t for t, _ in scores}) if how.get("by_turn") else [None]
    normal = [0.0] * len(scores)
    for pool in pools:
        places = [i for i, (t, _) in enumerate(scores) if pool is None or t == pool]
        for i, value in zip(
            places, group_normal([scores[i][1] for i in places], how.get("scale", True)), strict=True
        ):
            normal[i] = value
    return iter(normal)


def token_distributions(model, turn, temperature):
    ids = torch.tensor([turn.prompt + turn.completion])
    rows = torch.log_softmax(model(ids).logits[0].double() / temperature, -1)
    return rows[len(turn.prompt) - 1 : -1]


def loss(model, frozen, start, questions, **how):
    """Loss of one optimizer step over `questions`; `frozen` is the reference, `start` the weights of step
    0."""
    temperature, alpha = how.get("temperature", 1.0), how.get("alpha", 1.0)
    low, high = 1 - how.get("low", 0.2), 1 + how.get("high", 0.2)
    clipped = lambda ratio, a: -torch.minimum(ratio * a, ratio.clamp(low, high) * a)  # noqa: E731
    per_trajectory = []
    for question in questions:
        outcomes = group_normal(question.rewards, how.get("scale", True))
        if how.get("leave_one_out"):
            n = len(outcomes)
            outcomes = [a * n / (n - 1) for a in outcomes]
        if how.get("outcomes_as_they_are"):
            outcomes = question.rewards
        memory = memory_signal(question, how)
        for outcome, turns in zip(outcomes, question.trajectories, strict=True):
            tokens = []
            for turn in turns:
                a_memory, trained = alpha * next(memory), [i for i, s in enumerate(turn.sampled) if s]
                rows, picked = (
                    token_distributions(model, turn, temperature),
                    torch.tensor(turn.completion)[:, None],
                )
                new, old = rows.gather(1, picked)[:, 0], torch.tensor(turn.old, dtype=torch.float64)
                with torch.no_grad():
                    ref = token_distributions(frozen, turn, temperature).gather(1, picked)[:, 0]
                    at_start = token_distributions(start, turn, temperature).gather(1, picked)[:, 0]
                engine, old = old, at_start if how.get("recomputed") else old
                ratio = (new - old).exp()
                if how.get("sequence_ratio"):
                    ratio = (new - old)[trained].mean().exp().expand(len(new))
                for i in trained:
                    extra = a_memory if turn.span and turn.span[0] <= i < turn.span[1] else 0.0
                    if how.get("two_losses"):
                        value = clipped(ratio[i], outcome) + clipped(ratio[i], extra)
                    else:
                        value = clipped(
                            ratio[i], how["advantage"][id(turn)][i] if "advantage" in how else outcome + extra
                        )
                    value = value * min(math.exp(at_start[i] - engine[i]), how.get("cap", 1e9)) ** (
                        "cap" in how
                    )
                    d = (new[i] - ref[i]).clamp(-20, 20)
                    kl = {"k1": d, "k2": d * d / 2, "k3": ((-d).exp() - 1 + d).clamp(max=10)}[
                        how.get("kl_kind", "k3")
                    ]
                    entropy = -(rows[i].exp() * rows[i]).sum()
                    tokens.append(value + how.get("kl", 0.001) * kl - how.get("entropy", 0.0) * entropy)
            per_trajectory.append(tokens)
    per_trajectory = [tokens for tokens in per_trajectory if tokens]
    if how.get("mean_of_trajectories"):
        return sum(sum(tokens) / len(tokens) for tokens in per_trajectory) / len(per_trajectory)
    total = sum(sum(tokens) for tokens in per_trajectory)
    constant = how.get("constant")
    return total / (len(per_trajectory) * constant if constant else sum(map(len, per_trajectory)))
