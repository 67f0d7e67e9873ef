"""How rows are laid out into forward passes, and shared out over ranks.

Two layouts give equal log-probs and gradients:

- ``padded``: sequences of like length side by side, padded on the right. Under a causal mask padding on the
  right is invisible to every real token, so no mask is needed. Rows with the same prompt may share it: the
  prompt stands once, the distinct completions follow as branches that see the prompt and themselves only.
- ``packed``: all rows in one sequence, positions restarting with each; transformers derives the
  block-diagonal mask (or the variable-length kernel) from the positions. No padding at all.

Which hidden state predicts which token is an index list (`MicroBatch.sources`), so nothing downstream knows
the layout, and what is no trained token is never selected.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from trainer.row import Row

__all__ = ["MicroBatch", "Row", "empty_micro_batch", "micro_batches", "shard"]


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass. N trained tokens, in the order of ``rows``, then of their trained tokens.

    Attributes:
        rows: indices into the sequence of rows this was made from.
        input_ids: ``(B, L)``.
        positions: ``(B, L)``, or None where every sequence counts 0, 1, 2, ...
        mask: ``(B, 1, L, L)`` bool, True where a query (dim 2) may look; None: the plain causal mask.
        sources: ``(N,)`` flat index into ``B * L`` of the position whose hidden state predicts the token.
        targets: ``(N,)`` token ids.
    """

    rows: tuple[int, ...]
    input_ids: Tensor
    positions: Tensor | None
    mask: Tensor | None
    sources: Tensor
    targets: Tensor

    @property
    def tokens(self) -> int:
        """Tokens computed, padding included."""
        return self.input_ids.numel()

    def to(self, device: torch.device) -> MicroBatch:
        if device.type == "cpu":
            return self

        def move(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device, non_blocking=True)

        return MicroBatch(
            rows=self.rows,
            input_ids=self.input_ids.to(device),
            positions=move(self.positions),
            mask=move(self.mask),
            sources=self.sources.to(device),
            targets=self.targets.to(device),
        )


def micro_batches(
    rows: Sequence[Row],
    token_budget: int,
    *,
    layout: Literal["padded", "packed"] = "padded",
    share_prompts: bool = False,
) -> list[MicroBatch]:
    """Lay rows out into forward passes of at most ``token_budget`` tokens, padding included.

    Args:
        rows: those without a trained token are left out: they cannot change the gradient.
        token_budget: a single row (or a prompt with all its completions) over it is split off or goes alone.
        layout: see the module's docstring.
        share_prompts: rows with the same prompt share one copy of it; needs a model that takes a 4-d mask.

    Raises:
        ValueError: unknown layout, budget below 1, or shared prompts in the packed layout.
    """
    if token_budget < 1:
        raise ValueError(f"token budget is {token_budget}; at least 1 is needed")
    wanted = [index for index, row in enumerate(rows) if any(row.sampled)]
    if layout == "packed":
        if share_prompts:
            raise ValueError(
                "shared prompts need the layout 'padded': 'packed' has no room for a mask of its own"
            )
        return [_packed(rows, chosen) for chosen in _fill(rows, wanted, token_budget)]
    if layout != "padded":
        raise ValueError(f"layout is {layout!r}; padded or packed is needed")
    sequences = _sequences(rows, wanted, token_budget, share_prompts)
    # Those that need a mask apart from those that do not: without one the causal kernel skips half the work.
    sequences.sort(key=lambda sequence: (sequence.branched, sequence.length, sequence.members[0]))
    batches: list[MicroBatch] = []
    start = 0
    for end in range(1, len(sequences) + 1):
        # Sorted, so the sequence that would come next is the longest of the batch.
        full = end == len(sequences) or (end - start + 1) * sequences[end].length > token_budget
        kinds_differ = end < len(sequences) and (sequences[end].branched != sequences[start].branched)
        if full or kinds_differ:
            batches.append(_padded(rows, sequences[start:end]))
            start = end
    return batches


def empty_micro_batch() -> MicroBatch:
    """A forward pass that trains nothing: what a rank without rows computes to take part in collectives."""
    nothing = torch.zeros(0, dtype=torch.long)
    return MicroBatch((), torch.zeros(1, 1, dtype=torch.long), None, None, sources=nothing, targets=nothing)


def shard(rows: Sequence[Row], ranks: int) -> list[list[int]]:
    """Share rows out over ranks: row indices of each, with about equal numbers of tokens.

    Rows with one prompt stay together (they can share it), unless they are more than a rank's share.

    Raises:
        ValueError: fewer than one rank.
    """
    if ranks < 1:
        raise ValueError(f"{ranks} ranks; at least 1 is needed")
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for index, row in enumerate(rows):
        by_prompt.setdefault(row.prompt_ids, []).append(index)
    fair = sum(row.length for row in rows) / ranks
    units: list[list[int]] = []
    for members in by_prompt.values():
        whole = sum(rows[index].length for index in members) <= fair
        units += [members] if whole else [[index] for index in members]
    weights = [sum(rows[index].length for index in unit) for unit in units]
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for unit in sorted(range(len(units)), key=lambda number: (-weights[number], number)):
        lightest = loads.index(min(loads))
        shares[lightest] += units[unit]
        loads[lightest] += weights[unit]
    return shares


@dataclass(frozen=True)
class _Sequence:
    """One line of a padded batch: a prompt and the distinct completions that follow it."""

    prompt: tuple[int, ...]
    completions: tuple[tuple[int, ...], ...]
    members: tuple[int, ...]
    branch_of: tuple[int, ...]

    @property
    def length(self) -> int:
        return len(self.prompt) + sum(len(completion) for completion in self.completions)

    @property
    def branched(self) -> bool:
        return len(self.completions) > 1


def _sequences(rows: Sequence[Row], wanted: Iterable[int], token_budget: int, share: bool) -> list[_Sequence]:
    if not share:
        return [_Sequence(rows[i].prompt_ids, (rows[i].completion_ids,), (i,), (0,)) for i in wanted]
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for index in wanted:
        by_prompt.setdefault(rows[index].prompt_ids, []).append(index)
    sequences: list[_Sequence] = []
    for prompt, members in by_prompt.items():
        # A mask over branches costs their square, so a bundle is at most a few prompts long.
        limit = min(token_budget, max(6 * len(prompt), 512))
        branches: dict[tuple[int, ...], int] = {}
        taken: list[int] = []
        branch_of: list[int] = []
        length = len(prompt)
        for index in members:
            completion = rows[index].completion_ids
            if completion not in branches:
                if branches and length + len(completion) > limit:
                    sequences.append(_Sequence(prompt, tuple(branches), tuple(taken), tuple(branch_of)))
                    branches, taken, branch_of, length = {}, [], [], len(prompt)
                branches[completion] = len(branches)
                length += len(completion)
            taken.append(index)
            branch_of.append(branches[completion])
        sequences.append(_Sequence(prompt, tuple(branches), tuple(taken), tuple(branch_of)))
    return sequences


def _padded(rows: Sequence[Row], sequences: Sequence[_Sequence]) -> MicroBatch:
    width = max(sequence.length for sequence in sequences)
    branched = any(sequence.branched for sequence in sequences)
    ids: list[list[int]] = []
    positions: list[list[int]] = []
    branch: list[list[int]] = []
    members: list[int] = []
    sources: list[int] = []
    targets: list[int] = []
    for line, sequence in enumerate(sequences):
        prompt = len(sequence.prompt)
        flat = list(sequence.prompt)
        place = list(range(prompt))
        owner = [0] * prompt
        starts: list[int] = []
        for number, completion in enumerate(sequence.completions, start=1):
            starts.append(len(flat))
            flat.extend(completion)
            place.extend(range(prompt, prompt + len(completion)))
            owner.extend([number] * len(completion))
        for index, number in zip(sequence.members, sequence.branch_of, strict=True):
            members.append(index)
            # The first token of a branch is predicted by the prompt's last position, wherever the branch
            # stands.
            _select(rows[index], line * width + prompt - 1, line * width + starts[number], sources, targets)
        padding = width - len(flat)
        ids.append(flat + [0] * padding)
        positions.append(place + [0] * padding)
        branch.append(owner + [-1] * padding)
    return MicroBatch(
        rows=tuple(members),
        input_ids=torch.tensor(ids),
        positions=torch.tensor(positions) if branched else None,
        mask=_branch_mask(torch.tensor(branch)) if branched else None,
        sources=torch.tensor(sources),
        targets=torch.tensor(targets),
    )


def _branch_mask(branch: Tensor) -> Tensor:
    """``(B, 1, L, L)``: a token sees earlier tokens of the prompt (branch 0) and of its own branch."""
    width = branch.shape[1]
    same = branch[:, :, None] == branch[:, None, :]
    prompt = (branch == 0)[:, None, :]
    causal = torch.ones(width, width, dtype=torch.bool).tril()
    return ((same | prompt) & causal)[:, None]


def _packed(rows: Sequence[Row], chosen: Sequence[int]) -> MicroBatch:
    ids: list[int] = []
    positions: list[int] = []
    sources: list[int] = []
    targets: list[int] = []
    for index in chosen:
        row = rows[index]
        start = len(ids) + len(row.prompt_ids)
        ids.extend(row.prompt_ids)
        ids.extend(row.completion_ids)
        positions.extend(range(row.length))
        _select(row, start - 1, start, sources, targets)
    return MicroBatch(
        rows=tuple(chosen),
        input_ids=torch.tensor([ids]),
        positions=torch.tensor([positions]),
        mask=None,
        sources=torch.tensor(sources),
        targets=torch.tensor(targets),
    )


def _select(row: Row, before: int, start: int, sources: list[int], targets: list[int]) -> None:
    """Append where each trained token is predicted (the position before it) and what it is."""
    for offset, (token, sampled) in enumerate(zip(row.completion_ids, row.sampled, strict=True)):
        if sampled:
            sources.append(before if offset == 0 else start + offset - 1)
            targets.append(token)


def _fill(rows: Sequence[Row], wanted: Sequence[int], token_budget: int) -> list[list[int]]:
    """First-fit decreasing: few, evenly full sequences."""
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(wanted, key=lambda i: (-rows[i].length, i)):
        length = rows[index].length
        for number, free in enumerate(room):
            if length <= free:
                bins[number].append(index)
                room[number] -= length
                break
        else:
            bins.append([index])
            room.append(token_budget - length)
    return bins
