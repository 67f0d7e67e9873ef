"""Many sequences with shared beginnings as one row: a token tree, its attention mask and its position ids.

A row holds the nodes of a radix tree. A token sees its ancestors and itself, and its position is its depth.
So a causal model computes for every path exactly what it would compute for it as a sequence of its own, and
shared beginnings are computed once. Tokens whose output is needed come last in a row, so that the model's own
``logits_to_keep`` leaves out the vocabulary projection of all others.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Query:
    """How likely is each of ``answers`` after ``context``?

    Attributes:
        key: tells queries apart; equal keys mean equal content.
        context: C token ids, C >= 1.
        answers: alternatives, each of at least one token id.
    """

    key: Hashable
    context: Ids
    answers: tuple[Ids, ...]

    @property
    def tokens(self) -> int:
        """Input tokens that separate sequences need (the last token of an answer is never read)."""
        return sum(len(self.context) + len(answer) - 1 for answer in self.answers)

    @property
    def depth(self) -> int:
        """Input tokens of the longest path."""
        return len(self.context) + max(len(answer) for answer in self.answers) - 1


@dataclass(frozen=True, eq=False)
class Target:
    """One answer of a query, (A,) each: ``ids[i]``'s log-prob is read at column ``columns[i]`` of the row."""

    key: Hashable
    columns: Ids
    ids: Ids


@dataclass(eq=False)
class _Node:
    """A run of tokens without a fork; ``start`` and ``column``: depth and place in the row of its first."""

    ids: Ids
    start: int
    parent: _Node | None
    children: dict[int, _Node] = field(default_factory=dict)
    column: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.ids)


@dataclass(frozen=True, eq=False)
class TreeRow:
    """One row of n tokens.

    Attributes:
        ids, positions: (n,) token ids and depths.
        mask: (n, n) bool, True where the row's token sees the column's token.
        outputs: the last ``outputs`` columns are the ones whose logits are needed.
        targets: what to read there.
    """

    ids: Ids
    positions: Ids
    mask: NDArray[np.bool_]
    outputs: int
    targets: tuple[Target, ...]

    def __len__(self) -> int:
        return len(self.ids)


def build_row(queries: Sequence[Query]) -> TreeRow:
    """Lay all contexts and answers of ``queries`` (at least one) out as one tree."""
    root = _Node(np.empty(0, dtype=np.int64), 0, None)
    nodes: list[_Node] = []
    paths = [
        (query, answer, _insert(root, nodes, query, answer)) for query in queries for answer in query.answers
    ]
    nodes.sort(key=lambda node: node.start)  # parents before children
    total = 0
    for node in nodes:
        node.column = total
        total += len(node.ids)

    ids, positions = np.concatenate([node.ids for node in nodes]), np.empty(total, dtype=np.int64)
    mask = np.zeros((total, total), dtype=np.bool_)
    for node in nodes:
        here = slice(node.column, node.column + len(node.ids))
        positions[here] = np.arange(node.start, node.end)
        if node.parent is not None and node.parent is not root:
            mask[here] = mask[node.parent.column + len(node.parent.ids) - 1]
        mask[here, here] = np.tri(len(node.ids), dtype=np.bool_)

    columns = [_columns(end, len(query.context) - 1) for query, _, end in paths]
    needed = np.zeros(total, dtype=np.bool_)
    needed[np.concatenate(columns)] = True
    order = np.argsort(needed, kind="stable")
    place = np.empty(total, dtype=np.int64)
    place[order] = np.arange(total)
    return TreeRow(
        ids=ids[order],
        positions=positions[order],
        mask=mask[order][:, order],
        outputs=int(needed.sum()),
        targets=tuple(
            Target(query.key, place[found], answer)
            for (query, answer, _), found in zip(paths, columns, strict=True)
        ),
    )


def _insert(root: _Node, nodes: list[_Node], query: Query, answer: Ids) -> _Node:
    """Add a path; returns the node that ends with its last token, also after later splits."""
    ids = np.concatenate([query.context, answer[:-1]])
    node, at = root, 0
    while at < len(ids):
        child = node.children.get(int(ids[at]))
        if child is None:
            child = _Node(ids[at:], at, node)
            node.children[int(ids[at])] = child
            nodes.append(child)
            return child
        span = min(len(child.ids), len(ids) - at)
        differs = np.flatnonzero(child.ids[:span] != ids[at : at + span])
        common = int(differs[0]) if len(differs) else span
        node, at = _upper_part(child, common, nodes), at + common
    return node


def _upper_part(node: _Node, count: int, nodes: list[_Node]) -> _Node:
    """The node holding the first ``count`` tokens; ``node`` keeps the rest, so that paths still end at it."""
    if count == len(node.ids):
        return node
    upper = _Node(node.ids[:count], node.start, node.parent, {int(node.ids[count]): node})
    if node.parent is not None:
        node.parent.children[int(node.ids[0])] = upper
    nodes.append(upper)
    node.ids, node.start, node.parent = node.ids[count:], node.start + count, upper
    return upper


def _columns(end: _Node, first: int) -> Ids:
    """Columns of the tokens from depth ``first`` down to the end of a path."""
    runs: list[Ids] = []
    node: _Node | None = end
    while node is not None and node.end > first:
        skip = max(0, first - node.start)
        runs.append(np.arange(node.column + skip, node.column + len(node.ids)))
        node = node.parent
    return np.concatenate(runs[::-1])


def plan_rows(units: Sequence[Sequence[Query]], row_tokens: int, quadratic: float = 0.0) -> list[list[Query]]:
    """Split each unit (queries that share beginnings) into lists, each to become one tree.

    A tree of n tokens costs n + ``quadratic`` * n**2: under an explicit mask every token attends to the whole
    row. So a query starts a new tree when what it shares does not pay for the longer row, and when the tree
    would have more than ``row_tokens`` (a longer query gets a tree of its own). Sizes are upper estimates: a
    query adds what it does not share with the one before it.
    """
    rows: list[list[Query]] = []
    for unit in units:
        row: list[Query] = []
        total = 0
        for query in unit:
            alone = len(query.context) + sum(len(answer) - 1 for answer in query.answers)
            joined = total + alone - (_common(row[-1].context, query.context) if row else 0)
            pays = joined + quadratic * joined**2 <= total + alone + quadratic * (total**2 + alone**2)
            if row and (joined > row_tokens or not pays):
                rows.append(row)
                row, joined = [], alone
            row.append(query)
            total = joined
        if row:
            rows.append(row)
    return rows


def _common(left: Ids, right: Ids) -> int:
    span = min(len(left), len(right))
    differs = np.flatnonzero(left[:span] != right[:span])
    return int(differs[0]) if len(differs) else span
