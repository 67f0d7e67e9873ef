"""Rows and their layouts: index lists worked out by hand, and what no layout may change."""

import random

import pytest
import torch

from tests.trainer import toy
from tests.trainer.toy import row
from trainer.packing import micro_batches
from trainer.row import Row, flatten

# The toy vocabulary of pitfall 9: "ab" could be written as [a, b] or as [ab].
A, B, AB = 0, 1, 2


def test_what_was_sampled_is_what_is_trained():
    [batch] = micro_batches([row([AB], [A, B])], 100)
    assert batch.input_ids.tolist() == [[AB, A, B]]
    assert batch.targets.tolist() == [A, B]
    # Each token is predicted by the position before it; the prompt's own tokens are never targets.
    assert batch.sources.tolist() == [0, 1]
    assert batch.mask is None and batch.positions is None


def test_unsampled_tokens_are_read_but_not_trained():
    [batch] = micro_batches([row([5], [6, 7, 8], sampled=(True, False, True))], 100)
    assert batch.input_ids.tolist() == [[5, 6, 7, 8]]
    assert batch.targets.tolist() == [6, 8]
    assert batch.sources.tolist() == [0, 2]


def test_padding_is_a_matter_of_position_and_not_of_value():
    """Padding is id 0 and stands on the right; a real token 0 (an eos, say) is trained."""
    [batch] = micro_batches([row([3], [0]), row([4, 5], [0, 6, 0], trajectory=1)], 100)
    assert batch.input_ids.tolist() == [[3, 0, 0, 0, 0], [4, 5, 0, 6, 0]]
    assert batch.targets.tolist() == [0, 0, 6, 0]
    assert batch.sources.tolist() == [0, 6, 7, 8]


def test_packed_rows_restart_their_positions():
    [batch] = micro_batches([row([3, 4], [5]), row([6], [7, 8], trajectory=1)], 100, layout="packed")
    assert batch.rows == (0, 1)
    assert batch.input_ids.tolist() == [[3, 4, 5, 6, 7, 8]]
    assert batch.positions is not None
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1, 2]]
    assert batch.sources.tolist() == [1, 3, 4]
    assert batch.targets.tolist() == [5, 7, 8]


def test_a_shared_prompt_stands_once():
    rows = [row([3, 4], [5, 6]), row([3, 4], [7], trajectory=1), row([3, 4], [5, 6], trajectory=2)]
    [batch] = micro_batches(rows, 100, share_prompts=True)
    assert batch.rows == (0, 1, 2)
    assert batch.input_ids.tolist() == [[3, 4, 5, 6, 7]]  # equal completions stand once too
    assert batch.positions is not None and batch.mask is not None
    assert batch.positions.tolist() == [[0, 1, 2, 3, 2]]
    assert batch.targets.tolist() == [5, 6, 7, 5, 6]
    assert batch.sources.tolist() == [1, 2, 1, 1, 2]  # every branch begins at the prompt's end
    assert batch.mask[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 0, 0, 1],  # the second branch sees the prompt and not the first branch
    ]


def random_rows(count: int = 40, seed: int = 0) -> list[Row]:
    rng = random.Random(seed)
    prompts = [
        [rng.randrange(toy.VOCABULARY) for _ in range(rng.randrange(1, 12))] for _ in range(count // 3)
    ]
    rows = []
    for number in range(count):
        completion = [rng.randrange(toy.VOCABULARY) for _ in range(rng.randrange(0, 8))]
        sampled = tuple(rng.random() < 0.8 for _ in completion)
        numbers = tuple(rng.gauss(0, 1) for _ in completion)
        rows.append(
            row(rng.choice(prompts), completion, sampled=sampled, advantages=numbers, trajectory=number)
        )
    return rows


LAYOUTS = [
    {"layout": "padded"},
    {"layout": "padded", "share_prompts": True},
    {"layout": "packed"},
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("budget", [1, 17, 64, 10_000])
def test_every_trained_row_is_in_exactly_one_micro_batch(layout, budget):
    rows = random_rows()
    batches = micro_batches(rows, budget, **layout)
    placed = sorted(index for batch in batches for index in batch.rows)
    assert placed == [index for index, r in enumerate(rows) if any(r.sampled)]
    for batch in batches:
        longest = max(rows[index].length for index in batch.rows)
        assert batch.tokens <= max(budget, longest)
        expected = [
            token
            for index in batch.rows
            for token, sampled in zip(rows[index].completion_ids, rows[index].sampled, strict=True)
            if sampled
        ]
        assert batch.targets.tolist() == expected


def test_sharing_saves_tokens_and_packing_saves_padding():
    rows = random_rows()
    computed = {
        name: sum(batch.tokens for batch in micro_batches(rows, 64, **layout))
        for name, layout in zip(("padded", "shared", "packed"), LAYOUTS, strict=True)
    }
    assert computed["packed"] == sum(r.length for r in rows if any(r.sampled))
    assert computed["shared"] < computed["packed"] <= computed["padded"]


def test_flat_numbers_follow_the_trained_tokens():
    rows = [
        row([1], [2, 3, 4], sampled=(True, False, True), advantages=(1, float("nan"), 2)),
        row([1], [], trajectory=1),
        row([1], [5], advantages=(3,), turn=1),
    ]
    flat = flatten(rows)
    assert flat.offsets == (0, 2, 2, 3)
    assert flat.advantages.tolist() == [1, 2, 3]
    assert flat.row.tolist() == [0, 0, 2]
    assert flat.trajectory_tokens.tolist() == [3, 3, 3]  # rows 0 and 2 are turns of one trajectory
    assert flat.ref_logprobs is None
    assert flat.index([2, 0]).tolist() == [2, 0, 1]


def test_half_given_numbers_are_refused():
    rows = [row([1], [2], ref_logprobs=(-1.0,)), row([1], [3], trajectory=1)]
    with pytest.raises(ValueError, match="some rows have ref_logprobs"):
        flatten(rows)


@pytest.mark.parametrize("field", ["sampled", "advantages", "old_logprobs", "ref_logprobs", "rewards"])
def test_lengths_are_checked_where_a_row_is_made(field):
    with pytest.raises(ValueError, match=f"2 completion tokens has 1 {field}"):
        row([1], [2, 3], **{field: (1,)})


def test_a_row_needs_a_prompt():
    with pytest.raises(ValueError, match="at least one prompt token"):
        row([], [1])


def test_signal_is_a_trained_token_with_an_advantage():
    assert row([1], [2, 3], advantages=(0.0, 0.5)).has_signal
    assert not row([1], [2, 3], advantages=(0.0, 0.5), sampled=(True, False)).has_signal
    assert row([1], [2], advantages=(0.0,), memory_advantages=(0.5,)).has_signal


def test_bad_layouts_are_refused():
    for arguments in ({"layout": "ragged"}, {"layout": "packed", "share_prompts": True}):
        with pytest.raises(ValueError, match="layout"):
            micro_batches([row([1], [2])], 10, **arguments)
    with pytest.raises(ValueError, match="at least 1"):
        micro_batches([row([1], [2])], 0)


def test_no_rows_give_no_micro_batches():
    assert micro_batches([], 10) == []
    assert micro_batches([row([1], [])], 10) == []
    assert flatten([]).advantages.shape == torch.Size([0])
