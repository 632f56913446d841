"""Compares model and plan over the ranks before any rank acts on them.

With a plan that differs on one rank, the ranks would run different collectives: they would wait
for each other until the timeout, or take one tensor for another.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..comm.groups import gather_facts, inherit_timeout, sends
from ..comm.wires import name_ranks
from ..mesh.grid import Grid, describe_mesh

__all__ = ["Fact", "on_all_ranks"]

Fact = tuple[str, str]
"""A subject, and what holds for it on this rank, both worded for messages."""


@contextmanager
def on_all_ranks(mesh: DeviceMesh) -> Iterator[list[Fact]]:
    """Run the body, and raise an error on every rank of the mesh or on none.

    The body must not communicate, since a rank on which it raises skips the rest of it. Nothing is
    compared on a mesh of one rank, nor where nothing is sent (a fake process group).

    Args:
        mesh: a mesh that :func:`~torch_tp2d.mesh.grid.check_mesh` has passed.

    Yields:
        A list to which the body adds the facts that have to be the same on every rank.

    Raises:
        ValueError: if facts differ, naming the first that does and the ranks on either side; or if
            the body raised on other ranks only, quoting the errors. Where the body raised on this
            rank, its own error is raised.
    """
    facts: list[Fact] = []
    error: Exception | None = None
    try:
        yield facts
    except Exception as raised:
        error = raised
    try:
        if mesh.size() > 1 and sends(mesh):
            _compare(mesh, facts, error)
    finally:
        if error is not None:
            raise error


def _compare(mesh: DeviceMesh, facts: list[Fact], error: Exception | None) -> None:
    inherit_timeout(mesh)
    said = None if error is None else f"{type(error).__name__}: {error}"
    mine = json.dumps([said, facts]).encode()
    digest = _bytes_tensor(hashlib.sha256(mine).digest(), mesh)
    try:
        grid = Grid(mesh)
        digests = _of_all_ranks(digest, grid).view(mesh.size(), -1)
    except RuntimeError as failure:
        raise RuntimeError(
            f"not every rank of the mesh {describe_mesh(mesh)} came to parallelize_module: one "
            f"has raised, ended or is stuck elsewhere. {failure}"
        ) from failure
    if bool((digests == digests[0]).all()):
        return
    lengths = _of_all_ranks(torch.tensor([len(mine)], device=mesh.device_type), grid).tolist()
    padded = _bytes_tensor(mine.ljust(max(lengths)), mesh)
    rows = _of_all_ranks(padded, grid).view(mesh.size(), -1).tolist()
    reports = [json.loads(bytes(row)) for row in rows]
    ranks = mesh.mesh.flatten().tolist()
    errors = defaultdict(list)
    for rank, (raised, _) in zip(ranks, reports, strict=True):
        if raised is not None:
            errors[raised].append(rank)
    if errors:
        said = "; ".join(f"{name_ranks(which)}: {what}" for what, which in errors.items())
        raise ValueError(f"the plan was refused on other ranks, so it is here too. On {said}")
    differing = _differences(
        [
            (rank, [(about, text) for about, text in theirs])
            for rank, (_, theirs) in zip(ranks, reports, strict=True)
        ]
    )
    raise ValueError(
        f"the ranks of the mesh {describe_mesh(mesh)} were not given the same model and plan: "
        f"{'; '.join(differing)}. Nothing was changed: give parallelize_module the same on all"
    )


def _bytes_tensor(data: bytes, mesh: DeviceMesh) -> Tensor:
    return torch.tensor(list(data), dtype=torch.uint8, device=mesh.device_type)


def _of_all_ranks(x: Tensor, grid: Grid) -> Tensor:
    """Every rank's ``x`` (one dim, of the same length everywhere), row by row of the mesh."""
    for axis in (grid.col, grid.row):
        if axis.size > 1:
            x = gather_facts(x, axis.process_group)
    return x


def _differences(reports: Sequence[tuple[int, list[Fact]]]) -> list[str]:
    """Describes the first differing fact of each group of ranks that differs from the majority."""
    kinds: dict[str, tuple[list[int], list[Fact]]] = {}
    for rank, facts in reports:
        kinds.setdefault(json.dumps(facts), ([], facts))[0].append(rank)
    # Among groups of the same size, the one that comes first in the mesh counts as the majority.
    most, usual = max(kinds.values(), key=lambda kind: len(kind[0]))
    return [
        _difference(name_ranks(ranks), facts, name_ranks(most), usual)
        for ranks, facts in kinds.values()
        if facts is not usual
    ]


def _difference(here: str, facts: list[Fact], there: str, usual: list[Fact]) -> str:
    pairs = zip([*facts, ("", "")], [*usual, ("", "")], strict=False)
    (mine, my_text), (other, other_text) = next((a, b) for a, b in pairs if a != b)
    my_count, their_count = (Counter(about for about, _ in each) for each in (facts, usual))
    if mine == other:
        return f"{mine} is {my_text} on {here}, but {other_text} on {there}"
    if my_count[other] < their_count[other]:
        return f"{here} has no {other} ({other_text}), {there} {_have(there)}"
    if my_count[mine] > their_count[mine]:
        return f"{here} has {_a(mine)} ({my_text}), {there} {_have(there)} none"
    return f"{here} has {_a(mine)} where {there} {_have(there)} {_a(other)}: another order"


def _have(ranks: str) -> str:
    return "have" if ranks.startswith("ranks") else "has"


def _a(about: str) -> str:
    return f"{'an' if about[0] in 'aeiou' else 'a'} {about}"
