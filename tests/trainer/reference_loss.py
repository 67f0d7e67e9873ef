"""The whole update written from the formulas alone: one row at a time, full logits, float64; shares no code."""

import math
import statistics

import torch


def normal(values, scale=True):
    known = [v for v in values if v is not None and not math.isnan(v)]
    if len(known) < 2 or max(known) == min(known):
        return [0.0] * len(values)
    mean, std = statistics.mean(known), statistics.stdev(known) + 1e-6 if scale else 1.0
    return [0.0 if v is None or math.isnan(v) else (v - mean) / std for v in values]


def outcome_signal(rewards, how):
    n, signal = len(rewards), normal(rewards, how["scale"])
    return {"mean": signal, "leave_one_out": [a * n / (n - 1) for a in signal], "none": rewards}[how["less"]]


def memory_signal(question, how):
    scores = []
    for turns in question.trajectories:
        before = turns[0].p_full if turns else 0.0
        for t, turn in enumerate(turns):
            less = {"full": turn.p_full, "none": 0.0, "previous": before}[how["memory_less"]]
            scores.append((t, None if turn.p_mem is None else turn.p_mem - less))
            before = turns[0].p_full if turn.p_mem is None else turn.p_mem
    signal = {}
    for pool in {t if how["by_turn"] else None for t, _ in scores}:
        places = [i for i, (t, _) in enumerate(scores) if pool in (None, t)]
        signal.update(zip(places, normal([scores[i][1] for i in places]), strict=True))
    return iter(signal[i] for i in range(len(scores)))


def distributions(model, turn, temperature):
    ids = torch.tensor([turn.prompt + turn.completion])
    return torch.log_softmax(model(ids).logits[0].double() / temperature, -1)[len(turn.prompt) - 1 : -1]


def loss(model, frozen, start, questions, how, advantages=None):
    """Of one optimizer step; `frozen`: the reference, `start`: step 0's weights, `advantages`: a critic's."""
    trajectories = []
    for question in questions:
        memory = memory_signal(question, how)
        outcomes = outcome_signal(question.rewards, how)
        for outcome, turns in zip(outcomes, question.trajectories, strict=True):
            trajectories.append([])
            for turn in turns:
                a_memory, trained = how["alpha"] * next(memory), [i for i, s in enumerate(turn.sampled) if s]
                rows, picked = distributions(model, turn, how["T"]), torch.tensor(turn.completion)[:, None]
                new, engine = rows.gather(1, picked)[:, 0], torch.tensor(turn.old, dtype=torch.float64)
                fixed = [distributions(m, turn, how["T"]).gather(1, picked)[:, 0] for m in (frozen, start)]
                ref, first = (logprobs.detach() for logprobs in fixed)
                log_ratio = new - (first if how["recomputed"] else engine)
                if how["sequence_ratio"]:
                    log_ratio = log_ratio[trained].mean().expand(len(new))
                for i in trained:
                    extra = a_memory if turn.span and turn.span[0] <= i < turn.span[1] else 0.0
                    parts = [outcome, extra] if how["two_losses"] else [outcome + extra]
                    ratio, parts = log_ratio[i].exp(), [advantages[id(turn)][i]] if advantages else parts
                    bounded = ratio.clamp(1 - how["low"], 1 + how["high"])
                    value = sum(-torch.minimum(ratio * a, bounded * a) for a in parts)
                    value = value * (min(math.exp(first[i] - engine[i]), how["cap"]) if how["cap"] else 1.0)
                    d, entropy = new[i] - ref[i], -(rows[i].exp() * rows[i]).sum()
                    kl = {"k1": d, "k2": d * d / 2, "k3": ((-d).exp() - 1 + d).clamp(max=10)}[how["kl_kind"]]
                    trajectories[-1].append(value + how["kl"] * kl - how["entropy"] * entropy)
    trajectories = [tokens for tokens in trajectories if tokens]
    if how["mean"] == "trajectory":
        return sum(sum(tokens) / len(tokens) for tokens in trajectories) / len(trajectories)
    tokens = [token for tokens in trajectories for token in tokens]
    return sum(tokens) / (len(tokens) if how["mean"] == "token" else len(trajectories) * how["constant"])
