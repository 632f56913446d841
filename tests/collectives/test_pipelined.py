"""``pipelined``: the results of ``collective``, in an order of events that hides transfers.

The order is what the algorithm is for and no result shows it, so it is recorded: what a rank
sends, waits for and multiplies, one letter each.
"""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import PrepareModuleInput, SequenceParallel

from support import world
from support.marks import deep
from support.models import grid_mesh, relative
from support.pipelined import (
    Events,
    beside_one_device,
    differences,
    model,
    order_of_events,
    plan,
    regathered,
    tokens,
)
from torch_tp2d import Colwise2D, CommCounter, Rowwise2D, comm, parallelize_module
from torch_tp2d.runtime.deferred import Gathering

TOLERANCE = 1e-12
GRIDS = [(1, 1), (2, 2)]
DEEP = [deep(*grid) for grid in ((2, 3), (1, 4), (1, 2), (2, 1), (4, 1), (2, 4), (3, 3))]


@pytest.mark.parametrize("rows,columns", [*GRIDS, *DEEP])
def test_equals_one_device(rows: int, columns: int) -> None:
    """Even and uneven tokens and features, in many rounds, weights kept or gathered again."""
    for differs in world.run(rows * columns, _sizes_and_options, rows, columns):
        assert differs <= TOLERANCE


def _sizes_and_options(rows: int, columns: int) -> float:
    worst = 0.0
    even, uneven = (rows * 2, columns * 4, 24, 48), (rows + 1, columns * 3 + 1, 10, 14)
    for sizes, reshard in ((even, False), (uneven, False), (uneven, True), (even, None)):
        options = {"reshard_after_forward": reshard}
        worst = max(worst, beside_one_device(rows, columns, sizes, options))
    return worst


KINDS = {
    "user code reads the gathered input": {"touches": True},
    "recomputed": {"steps": ("recomputed", "plain", "recomputed")},
    "inference between": {"steps": ("plain", "inference", "plain")},
    "inputs are gathered again": {"regather_input": True},
    "inputs are gathered again after recomputation": {
        "regather_input": True,
        "steps": ("recomputed", "plain"),
    },
    "weights change between": {"steps": ("stepped", "stepped", "plain")},
}


OFTEN = {"recomputed", "inference between", "weights change between"}


@pytest.mark.parametrize("kind", [kind if kind in OFTEN else deep(kind) for kind in KINDS])
def test_equals_one_device_when(kind: str) -> None:
    for differs in world.run(4, beside_one_device, 2, 2, (4, 8, 24, 48), dict(KINDS[kind])):
        assert differs <= TOLERANCE


def test_the_first_of_q_k_and_v_gathers_for_all() -> None:
    for differs in world.run(4, _unprepared):
        assert differs <= TOLERANCE


def _unprepared() -> float:
    """q, k and v each given a sharded input: one gather, whose gradient they share."""
    comm.axis.PIECE_BYTES = 256
    mesh = grid_mesh(2, 2)
    one = model(24, 48)[0].mix
    several = parallelize_module(
        copy.deepcopy(one),
        mesh,
        {"w[qkv]": Colwise2D(input_layouts=Shard(1)), "wo": Rowwise2D(output_layouts=Shard(1))},
    )
    whole = tokens(4, 8, 24)
    one(whole).square().mean().backward()
    mine = whole.chunk(2)[mesh.get_local_rank(0)].chunk(2, 1)[mesh.get_local_rank(1)]
    mine = mine.clone().requires_grad_()
    with CommCounter(mesh) as counted:
        (several(mine * 1).square().sum() / whole.numel()).backward()
    # The input's shard is 2 x 4 x 24 doubles, 1536 B, and so is that of its gradient; wo moves
    # as much; 8 B tell the ranks each other's number of tokens.
    moved = sum(count for (axis, _), count in counted.bytes.items() if axis == "tp_col")
    assert moved == 4 * 1536 + 8, str(counted)
    return max(differences(one, several))


def test_inputs_gathered_again_are_not_kept() -> None:
    """Two blocks of two gathers: each 2 x 4 x 24 doubles once more, though q, k and v need it."""
    assert set(world.run(4, regathered)) == {(0, 4 * 1536)}


@pytest.mark.gloo
def test_the_order_of_events() -> None:
    """Both rounds of a gather are under way before anything is multiplied, and so on.

    A pass begins with asking how many tokens the others have (``g.``): the input is local.
    Forward: the weight's gather (``GGG``, in three pieces, the second time both weights') before
    the input's (``ss``), of which the rank's own rows are multiplied first, then each round when it
    is there and the next still travels (``x.x.x``); of the output, each round for the other rank is
    multiplied and sent, then the rank's own rows are, before either is waited for (``xsxsx..``).
    Backward: the gradient's rows multiplied twice each, for the input and for the weight
    (``xx.xx.xx``); the sums for bias and weight leave (``RSSS``); the input's gradient leaves by
    rounds (``xsxsx``), and the other bias's, and the other weight's is multiplied (``Rx``) before
    anything is waited for, if its parameters were taken up ahead of time: not in the first pass,
    which waits for the first weight's (``....``) before. It is sent when the input's gradient is
    there (``..SSS``).
    """
    for events in world.run(4, order_of_events):
        assert events == (
            "GGGg.ss...x.x.xGGG...xsxsx..",
            "ssxx.xx.xxRSSS....xsxsxRx..SSS....",
            "GGGGGGg.ss...x.x.x...xsxsx..",
            "ssxx.xx.xxRSSSxsxsxRx......SSS....",
        )


@pytest.mark.gloo
def test_the_order_of_events_where_only_weights_move() -> None:
    """Backward: both weights' sums leave before their inputs' gradients (``xRSSSx``).

    A Colwise2D's was multiplied when all else had been waited for, as if a gradient of the input
    were still to come beside which to do it: on rows alone only a Rowwise2D's sum overlapped with
    anything.
    """
    for events in world.run(4, order_of_events, 4, 1):
        assert events == (
            "GGG...xGGG...x",
            "xRSSSx....xRSSSx....",
            "GGGGGG...x...x",
            "xRSSSxxRSSSx........",
        )


def _order_of_a_norm() -> str:
    norm = parallelize_module(
        nn.Sequential(nn.LayerNorm(24)).double(), grid_mesh(2, 2), {"0": SequenceParallel()}
    )
    events = Events(norm[0]._tp2d.grid.row)
    mine = tokens(2, 4, 24, torch.distributed.get_rank())
    # The first input from outside is compared over the rows.
    norm(mine)
    with events:
        norm(mine)
    return events.seen


def test_a_norm_asks_for_sizes_before_it_computes() -> None:
    """Both at once (``Gg``), and waits for the answers when it is done (``n..``)."""
    assert world.run(4, _order_of_a_norm) == ["Ggn.."] * 4


def _order_of_inference() -> str:
    mesh = grid_mesh(2, 2)
    several = parallelize_module(
        nn.Sequential(nn.Linear(24, 48), nn.Tanh(), nn.Linear(48, 24)).double(),
        mesh,
        {"0": Colwise2D(input_layouts=Shard(1)), "2": Rowwise2D(output_layouts=Shard(1))},
    )
    events = Events(several[0]._tp2d.grid.row)
    with torch.no_grad(), events:
        for _ in range(2):
            events.seen = ""
            several(tokens(2, 4, 24))
    return events.seen


def test_a_pass_begins_with_gathers_where_none_ended_in_backward() -> None:
    """Both weights' (``GG``) before anything else.

    The start of a pass was told by the backward before it, so inference gathered each weight when
    it was needed.
    """
    for events in world.run(4, _order_of_inference):
        assert events.startswith("GG"), events
        assert "G" not in events[2:], events


def _order_resharded() -> tuple[str, str, str, str]:
    return order_of_events(reshard_after_forward=True)


@pytest.mark.gloo
def test_the_order_of_events_when_weights_are_gathered_again() -> None:
    """Backward: the last weight's gather starts with the gradient's, and so does the next one's.

    Each module's gather began in its own backward, and was waited for at once.
    """
    for events in world.run(4, _order_resharded):
        assert events[1::2] == (
            "GGGssGGG...xx.xx.xxRSSS.......xsxsxRx..SSS....",
            "GGGssGGG...xx.xx.xxRSSS...xsxsxRx......SSS....",
        )


def _order_of_two_layers() -> tuple[str, str]:
    mesh = grid_mesh(2, 2)
    comm.axis.PIECE_BYTES = 4 * 8 * 24
    torch.manual_seed(0)
    layer = [nn.LayerNorm(24), nn.Linear(24, 48), nn.Tanh(), nn.Linear(48, 24)]
    several = parallelize_module(
        nn.Sequential(*layer, *copy.deepcopy(layer)).double(),
        mesh,
        {
            "[04]": SequenceParallel(),
            "[15]": Colwise2D(input_layouts=Shard(1)),
            "[37]": Rowwise2D(output_layouts=Shard(1)),
        },
    )
    mine = tokens(2, 4, 24, mesh.get_rank())
    forward, backward = "", ""
    for _ in range(2):
        events = Events(several[1]._tp2d.grid.row)
        with events:
            loss = several(mine * 1).square().sum()
        forward, events.seen = events.seen, ""
        with events:
            loss.backward()
        backward = events.seen
    return forward, backward


@pytest.mark.gloo
def test_what_is_not_urgent_travels_when_nothing_urgent_does() -> None:
    """Gathers of weights to come, and sums of parameters' gradients.

    Forward: four weights' gathers start with the pass, as nothing else travels yet (``GGG`` four
    times, before the norm, ``n``).
    Backward: the gradient of the second layer's first weight, multiplied while the input's travels
    (``xsxsxRx``), leaves only when the first layer's second product is there (``SSSRRSSS``, with
    that norm's and that product's own), as code that sends nothing comes next. It left at once, and
    took half of the link from the gradients that backward waits for; then, while the activation or
    attention was computed, the link was idle. And backward waited for the sums of a norm's
    gradients, along one axis and then the other (``R.r.``): now nothing waits for them before the
    layer's end.
    """
    for forward, backward in world.run(4, _order_of_two_layers):
        assert forward == "GgGGGGGGGGGGGGn..ss...x.x.x...xsxsx..Ggn..ss...x.x.x...xsxsx.."
        assert backward == (
            "ssxx.xx.xxRSSSxsxsxRx..ssxx.xx.xxSSSRRSSSxsxsxRx...........r.....SSSR.....r."
        )


def _stale() -> float:
    """Parameters that change after they were taken up ahead of time, in the middle of a forward."""
    mesh = grid_mesh(2, 1)
    torch.manual_seed(0)
    one = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).double()
    several = parallelize_module(copy.deepcopy(one), mesh, {"*": Colwise2D()})
    worst = 0.0
    for step in range(5):
        for stack in (one, several):
            for hook in list(stack[0]._forward_hooks):
                del stack[0]._forward_hooks[hook]

            def change(
                module: Any, args: Any, out: Any, last: Any = stack[1], step: int = step
            ) -> None:
                with torch.no_grad():
                    if step % 2:
                        last.weight.mul_(1.5)
                    else:
                        last.bias = nn.Parameter(last.bias * 1.5)

            stack[0].register_forward_hook(change)
        whole = tokens(2, 3, 6, step)
        mine = whole.chunk(2)[mesh.get_local_rank(0)]
        expected = one(whole).chunk(2)[mesh.get_local_rank(0)]
        worst = max(worst, relative(several(mine), expected))
    return worst


def test_a_parameter_changed_since_it_was_taken_up_is_taken_up_again() -> None:
    """Only weights were looked at: a bias put in another's place came into force a pass later."""
    for differs in world.run(2, _stale):
        assert differs <= TOLERANCE


def _skipping() -> float:
    """Modules in another order each time: nothing gathered ahead may be left over or mixed up.

    In between the weights change as FSDP2 changes them, without a sign that they did.
    """
    mesh = grid_mesh(2, 1)
    torch.manual_seed(0)
    one = nn.ModuleList(nn.Linear(6, 6) for _ in range(5)).double()
    several = parallelize_module(copy.deepcopy(one), mesh, {"*": Colwise2D()})
    worst = 0.0
    learning = ((0, 1, 2, 3, 4), (0, 1, 2, 3, 4), (0, 2, 4), (4, 1, 1, 3), (0, 1), (3, 4, 0))
    inference = ((0, 1), (0, 1, 3, 4))
    for learns, order in (*product((True,), learning), *product((False,), inference)):
        whole = tokens(2, 3, 6)
        mine = whole.chunk(2)[mesh.get_local_rank(0)]
        with torch.set_grad_enabled(learns):
            for index in order:
                whole, mine = one[index](whole), several[index](mine)
        worst = max(worst, relative(mine, whole.chunk(2)[mesh.get_local_rank(0)]))
        if learns:
            whole.square().sum().backward()
            mine.square().sum().backward()
        for before, after in zip(one, several, strict=True):
            before.weight.data.mul_(1.1)
            after.weight.data.to_local().mul_(1.1)
    return max(worst, *differences(one, several))


def test_modules_in_another_order() -> None:
    for differs in world.run(2, _skipping):
        assert differs <= TOLERANCE


def _two_models() -> list[list[int]]:
    mesh = grid_mesh(2, 2)
    x = tokens(4, 8, 8).chunk(2)[mesh.get_local_rank(0)].chunk(2, 1)[mesh.get_local_rank(1)]
    models = [parallelize_module(model(8, 16), mesh, plan()) for _ in range(2)]
    moved: list[list[int]] = [[], []]
    for trained in models:
        # The first input from outside is compared over the rows.
        trained(x)
    for _ in range(3):
        for trained, passes in zip(models, moved, strict=True):
            with CommCounter(mesh) as counter:
                trained(x).sum().backward()
            passes.append(counter.total_bytes)
    return moved


def test_the_end_of_one_model_gathers_nothing_of_the_next() -> None:
    """What followed the last module of a first model was the first of a second, so from then on
    each pass of the first gathered four weights of the second and threw them away.
    """
    for first, second in world.run(4, _two_models):
        assert first == second and len(set(first)) == 1, (first, second)


def _as_a_tensor() -> None:
    """What user code may do with a gathered input that is still on its way."""
    mesh = grid_mesh(1, 2)
    seen: list[Tensor] = []

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            # As a style that may take the input while it arrives; this forward does not let it.
            self.linear = nn.Linear(6, 6).double()

        def forward(self, x: Tensor) -> Tensor:
            seen.append(x)
            batch, sequence, hidden = x.shape
            assert isinstance(x, Tensor) and x.dtype == torch.float64 and x.requires_grad
            assert "Gathering" in repr(x)
            halves = x.view(batch, sequence, 2, hidden // 2).transpose(1, 2)
            return halves.sum() + x[0, 0, 0] * len(x) + torch.cat([x, x]).mean() + x.max().item()

    prepare = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    module = parallelize_module(Reads(), mesh, {"": prepare, "linear": Colwise2D()})
    whole = tokens(2, 4, 6).requires_grad_()
    mine = whole.detach().chunk(2, 1)[mesh.get_local_rank(1)].clone().requires_grad_()
    total = module(mine)
    reference = (
        whole.sum() + whole[0, 0, 0] * 2 + torch.cat([whole, whole]).mean() + whole.max().item()
    )
    torch.testing.assert_close(total, reference)
    reference.backward()
    total.backward()
    assert whole.grad is not None
    torch.testing.assert_close(mine.grad, whole.grad.chunk(2, 1)[mesh.get_local_rank(1)])
    assert isinstance(seen[0], Gathering)


def test_a_gathered_input_is_an_ordinary_tensor_to_user_code() -> None:
    world.run(2, _as_a_tensor)
