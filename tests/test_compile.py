"""``torch.compile(fullgraph=True)`` of a block: one graph, the same numbers.

The backend partitions and deduplicates the graph as Inductor does, without its C++ compiler.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import world
from marks import deep
from models import grid_mesh, parallelize, plan_2d, plan_mixed, train_beside, transformer

TOLERANCE = 1e-11
BACKEND = "aot_eager_decomp_partition"


def _compiled(backend: str, plan: dict[str, Any], sizes: tuple[int, int, int]) -> float:
    size, sequence, vocab = sizes
    reference = transformer(vocab, n_layers=1)
    model = copy.deepcopy(reference)
    parallelize(model, grid_mesh(2, 2), plan)
    for layer in model.layers:
        layer.compile(fullgraph=True, backend=backend)
    return train_beside(reference, model, vocab, size, sequence)


@pytest.mark.parametrize("sizes", [(3, 13, 33), deep((4, 8, 8))])
def test_a_block_is_one_graph(sizes: tuple[int, int, int]) -> None:
    assert max(world.run(4, _compiled, BACKEND, plan_2d(), sizes)) < TOLERANCE


def test_a_block_of_a_mixed_plan_is_one_graph() -> None:
    assert max(world.run(4, _compiled, BACKEND, plan_mixed(), (4, 8, 8))) < TOLERANCE


@pytest.mark.parametrize(
    "algorithm",
    [deep("summa"), deep("bmr"), deep("cannon")],
)
def test_every_algorithm_traces(algorithm: str) -> None:
    """q, k and v broadcast one input three times: one node in the graph of the broadcast's
    source, three in the others' until their buffers came to depend on the same input. It hung.
    """
    plan = plan_2d()
    for key, style in plan.items():
        if "attention.w" in key or "feed_forward" in key:
            style.algorithm = algorithm
    assert max(world.run(4, _compiled, BACKEND, plan, (4, 8, 8))) < TOLERANCE


@pytest.mark.deep
def test_inductor() -> None:
    assert max(world.run(4, _compiled, "inductor", plan_2d(), (4, 8, 8))) < TOLERANCE
