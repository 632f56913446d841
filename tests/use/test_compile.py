"""``torch.compile(fullgraph=True)`` of a block: one graph, the same numbers.

The backend partitions and deduplicates the graph as Inductor does, without its C++ compiler.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import torch_tp2d
from support import world
from support.compiled import check_one_order, recorded
from support.decoder import Attention
from support.marks import deep, from_torch
from support.models import (
    RMSNorm,
    batch,
    grid_mesh,
    loss_of,
    noise,
    parallelize,
    plan_2d,
    plan_mixed,
    relative,
    train_beside,
    transformer,
)

TOLERANCE = 1e-11
BACKEND = "aot_eager_decomp_partition"
SIZES = (3, 13, 33), (4, 8, 8)


def _compiled(
    backend: str,
    plan: dict[str, Any],
    sizes: tuple[int, int, int],
    grid: tuple[int, int] = (2, 2),
) -> float:
    size, sequence, vocab = sizes
    reference = transformer(vocab, n_layers=1)
    model = copy.deepcopy(reference)
    parallelize(model, grid_mesh(*grid), plan)
    for layer in model.layers:
        layer.compile(fullgraph=True, backend=backend)
    return train_beside(reference, model, vocab, size, sequence)


@pytest.mark.parametrize(
    "sizes,grid",
    [*(deep(SIZES[0], grid) for grid in ((2, 1), (1, 2))), *(deep(s, (2, 2)) for s in SIZES)],
    ids=str,
)
def test_a_block_is_one_graph(sizes: tuple[int, int, int], grid: tuple[int, int]) -> None:
    rows, columns = grid
    ranks = rows * columns
    assert max(world.run(ranks, _compiled, BACKEND, plan_2d(), sizes, grid)) < TOLERANCE


@pytest.mark.parametrize(
    "grid,sizes",
    [
        ((2, 1), (1, 4, 8)),
        deep((2, 2), (1, 5, 11)),
        deep((4, 1), (3, 4, 8)),
        deep((1, 2), (2, 1, 8)),
        deep((1, 4), (2, 5, 11)),
    ],
    ids=str,
)
def test_a_rank_without_tokens(grid: tuple[int, int], sizes: tuple[int, int, int]) -> None:
    """A batch smaller than the rows, or a sequence that leaves a column none. It hung: torch's
    decomposition of a norm's backward gives constants for no tokens, and a gather or sum of nothing
    gave a new tensor, so that the sums of gradients of this rank did not depend on backward, and
    were in its graph of forward.
    """
    rows, columns = grid
    assert max(world.run(rows * columns, _compiled, BACKEND, plan_2d(), sizes, grid)) < TOLERANCE


@pytest.mark.deep
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


def _evaluated(grid: tuple[int, int]) -> list[float]:
    """Losses without gradients, and a step beside frozen norms, each of other sizes."""
    reference = transformer(11, n_layers=1)
    model = copy.deepcopy(reference)
    parallelize(model, grid_mesh(*grid), plan_2d())
    for layer in model.layers:
        layer.compile(fullgraph=True, backend=BACKEND)
    model(batch(2, 4, 11)[0])  # The first forward is in eager.
    seen = []
    for part in (reference, model):
        for name, param in part.named_parameters():
            param.requires_grad_("norm" not in name)
    for size, sequence, learns in ((3, 7, False), (4, 5, True), (2, 9, False)):
        ids, target = batch(size, sequence, 11, seed=size)
        with torch.set_grad_enabled(learns):
            wanted, loss = loss_of(reference(ids), target), loss_of(model(ids), target)
        seen.append(relative(loss.detach(), wanted.detach()))
        if learns:
            wanted.backward()
            loss.backward()
            pairs = zip(model.parameters(), reference.parameters(), strict=True)
            seen += [relative(a.grad, b.grad) for a, b in pairs if b.requires_grad]
    return seen


@pytest.mark.deep
@pytest.mark.parametrize("grid", [(2, 1), (2, 2), (1, 4)], ids=str)
def test_evaluation_and_frozen_norms(grid: tuple[int, int]) -> None:
    """A compiled block raised under ``no_grad``, as in validation, and where its LayerNorms learn
    nothing, as with LoRA: "setattr() is not supported on type list". There Dynamo counts the
    arguments of an autograd.Function's forward, two parameters behind a ``*params`` among them, to
    find out whether it takes a context.
    """
    rows, columns = grid
    for seen in world.run(rows * columns, _evaluated, grid):
        assert max(seen) < TOLERANCE


def _graphs() -> int:
    mesh = grid_mesh(2, 1)
    block = nn.Sequential(RMSNorm(8), nn.Linear(8, 8)).double()
    torch_tp2d.parallelize_module(block, mesh, {"1": torch_tp2d.Colwise2D()})
    counter = CompileCounter()
    block.compile(fullgraph=True, backend=counter)
    for step in range(3):
        x = noise(2, 3, 8, seed=step)
        block(DTensor.from_local(x, mesh, (Shard(0), Replicate()))).sum().backward()
    return counter.frame_count


def test_a_norm_of_somebody_s_own_is_traced_once() -> None:
    """Each step of a block with Hugging Face's Llama norm was compiled anew, until torch's limit of
    eight graphs: the ids of the tensors that such a module's own code was given, by which those are
    told apart that all ranks have, became conditions of the graph.
    """
    assert world.run(2, _graphs) == [1, 1]


def _unknown_sizes() -> list[float]:
    """A local stream without an embedding, whose sequence of 7 does not divide."""
    mesh = grid_mesh(1, 2)
    reference = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)).double()
    model = copy.deepcopy(reference)
    plan = {
        "0": torch_tp2d.Colwise2D(input_layouts=Shard(1)),
        "2": torch_tp2d.Rowwise2D(output_layouts=Shard(1)),
    }
    torch_tp2d.parallelize_module(model, mesh, plan)
    whole = noise(2, 7, 8)
    x = whole.split([4, 3], 1)[mesh.get_local_rank("tp_col")]
    wanted = reference(whole).split([4, 3], 1)[mesh.get_local_rank("tp_col")].detach()
    traced = torch.compile(model, fullgraph=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"run it in torch_tp2d\.token_sizes"):
        traced(x)
    # It goes on in eager, which asks the other ranks.
    seen = [relative(torch.compile(model, backend="eager")(x).detach(), wanted)]
    with torch_tp2d.token_sizes(mesh, (2, 7)):
        seen.append(relative(traced(x).detach(), wanted))
    return seen


@pytest.mark.deep
def test_sizes_that_a_graph_does_not_know() -> None:
    """A graph took the other ranks' parts of tokens of unknown sizes to be as long as its own: with
    a sequence that does not divide, ranks sent one another other sizes than they expected.
    """
    for seen in world.run(2, _unknown_sizes):
        assert max(seen) < TOLERANCE


def _ring() -> float:
    mesh, worst = grid_mesh(2, 1), 0.0
    torch.manual_seed(0)
    reference = Attention(16, 4, 2, 4).double()
    model = copy.deepcopy(reference)
    q, kv, o = torch_tp2d.attention_projections(4, 2, 1, row_dim=1)
    plan = {"": torch_tp2d.Attention2D(row_dim=1, algorithm="ring"), "q": q, "[kv]": kv, "o": o}
    torch_tp2d.parallelize_module(model, mesh, plan)
    model.compile(fullgraph=True, backend="eager")
    for size, sequence in ((4, 8), (3, 7)):
        x = noise(size, sequence, 16)
        wanted = reference(x)
        placed = distribute_tensor(x, mesh, (Shard(1), Replicate()), src_data_rank=None)
        worst = max(worst, relative(model(placed).detach(), wanted.detach()))
    return worst


@pytest.mark.deep
def test_a_length_of_which_one_rank_has_as_much_as_before() -> None:
    """Of sequences of 8 and then of 7 the first of two rows has 4 tokens: its graph for the second
    had a constant for them, and symbols for what followed from the sequence, which is in no tuple
    of numbers for Dynamo, so that this rank alone raised, about "caches of past keys".
    """
    assert max(world.run(2, _ring)) < TOLERANCE


@pytest.mark.deep
@from_torch("2.13", "Inductor's backward of attention in fp64 raises, on one device too")
def test_inductor() -> None:
    assert max(world.run(4, _compiled, "inductor", plan_2d(), (4, 8, 8))) < TOLERANCE


@pytest.mark.deep
@pytest.mark.parametrize("touches", [False, True])
def test_inductor_in_rounds(touches: bool) -> None:
    for differs, _ in world.run(
        4, recorded, 2, 2, (4, 8, 24, 48), 2 * 2 * 24 * 8, touches, "inductor"
    ):
        assert differs < TOLERANCE


@pytest.mark.gloo
@pytest.mark.deep
def test_rounds_in_the_graph() -> None:
    """Here every transfer along tp_col is in two rounds (``gg``, ``ss``).

    Forward: q, k and v share one gather, both rounds of which are under way, and the weight's,
    before q's first product (``Ggg..x.x``); k and v gather their weights (``G.x``); wo sends the
    first round's product before it computes the second (``xsxs..``); w1 as q, w2 as wo, their
    weights in three pieces. Backward, of w2: the output's gradient is multiplied for the weight's
    as it comes (``gg.x.x``), and while that is reduced (``SSS``, and ``R`` of the bias) for the
    input's (``x``); w1: the input's gradient leaves by rounds, and the weight's product is between
    that and the wait (``xsxs`` ``xSSSR`` ``......``); wo as w2; v and k hand on a share of the
    gradient of what they share, and q, as w1, sends the sum of all three.
    """
    for differs, graphs in world.run(4, recorded, 2, 2, (4, 8, 24, 48), 2 * 2 * 24 * 8):
        assert differs < TOLERANCE
        assert graphs == [
            "Ggg..x.xG.xG.xG.xsxs..GGGgg....x.xGGG...xsxs..",
            "gg.x.xSSSRx....xsxsxSSSR......gg.x.xSRx..xSRx..xSx.xsxsxSR....",
        ]


@pytest.mark.gloo
@pytest.mark.deep
def test_user_code_that_reads_a_gathered_input() -> None:
    """It costs no transfer; that of the gradient it has made is not in rounds."""
    for differs, graphs in world.run(4, recorded, 2, 2, (4, 8, 24, 48), 2 * 2 * 24 * 8, True):
        assert differs < TOLERANCE
        assert graphs[0].count("g") == 4


@pytest.mark.parametrize("rows,columns,sequence", [deep(1, 3, 7), deep(2, 3, 7), deep(1, 4, 5)])
def test_rounds_of_uneven_sizes(rows: int, columns: int, sequence: int) -> None:
    """All ranks that send to each other have to start the same transfers in the same order.

    On 1 x 4 one rank has no tokens, so that what it sends to two gathers was one node of its
    graph; the others waited for the second.
    """
    sizes = (3, sequence, 10, 14)
    answers = world.run(rows * columns, recorded, rows, columns, sizes, 2 * 10 * 8)
    assert max(differs for differs, _ in answers) < TOLERANCE
    check_one_order([graphs for _, graphs in answers], columns)


def _checkpointed(inside: bool, backend: str, selective: bool) -> float:
    """Checkpointing and compile of a block, either around the other."""

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    options: dict[str, Any] = {"preserve_rng_state": False}
    if selective:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, policy)
    reference = transformer(8, n_layers=2)
    model = copy.deepcopy(reference)
    parallelize(model, grid_mesh(2, 2), plan_2d())
    for index, layer in enumerate(model.layers):
        if not inside:
            layer.compile(fullgraph=True, backend=backend)
        wrapped = checkpoint_wrapper(layer, **options)
        if inside:
            wrapped.compile(fullgraph=True, backend=backend)
        model.layers[index] = wrapped
    return train_beside(reference, model, 8, 3, 7)


INSIDE = [
    pytest.param(
        True,
        "eager",
        selective,
        marks=[pytest.mark.deep, from_torch("2.13", "its Dynamo refuses it: Unsafe side effect")],
    )
    for selective in (True, False)
]


@pytest.mark.parametrize(
    "inside,backend,selective",
    [
        *INSIDE,
        deep(False, BACKEND, False),
        deep(False, BACKEND, True),
    ],
)
def test_checkpointing_with_compile(inside: bool, backend: str, selective: bool) -> None:
    """Inside a compiled block, as torchtitan orders them, and around one.

    Inside, Dynamo refused an attribute that was written on what an autograd.Function gave ("Unsafe
    side effect"). torch 2.13's own AOTAutograd fails there with stock plans too, hence "eager".
    """
    assert max(world.run(4, _checkpointed, inside, backend, selective)) < TOLERANCE
