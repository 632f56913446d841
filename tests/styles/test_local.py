"""Local2D: a module on this row's local tensors, beside one device in fp64, or refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import SequenceParallel
from torch.utils.checkpoint import checkpoint

import torch_tp2d
from support import world
from support.marks import deep
from support.models import grid_mesh, noise, relative
from support.one_module import feed, gradients, no_difference, spread, whole
from torch_tp2d import Colwise2D, Local2D, Rowwise2D, parallelize_module
from torch_tp2d.styles.mixed_tokens import mixes

WIDTH, VOCAB = 6, 11
ROW, TOKENS = (Shard(0), Replicate()), (Shard(0), Shard(1))


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Pool(Scale):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1) * self.scale


class PoolKept(Scale):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1, keepdim=True) * self.scale


class Viewed(Scale):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).reshape(*x.shape[:2], -1, 3).sin().flatten(2)


class Checkpointed(Scale):
    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(super().forward, x, use_reentrant=self.reentrant)
        return torch.tanh(checkpoint(super().forward, torch.tanh(y), use_reentrant=self.reentrant))


class Chosen(NamedTuple):
    weights: Tensor
    rest: dict[str, Any]


class Router(Scale):
    def forward(self, x: Tensor) -> Chosen:
        y = super().forward(x)
        return Chosen(y, {"best": y.argmax(-1), "all": [y.sin()], "name": "router", "none": None})


@dataclass
class Pair:
    one: Tensor
    other: Tensor


class Twice(Scale):
    def forward(self, x: Tensor) -> Pair:
        return Pair(x * self.scale, x)


class Model(nn.Module):
    """A feed-forward layer on embedded tokens, and a module that is to be Local2D's."""

    def __init__(self, last: Callable[[], nn.Module], residual: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.residual = residual
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)
        self.last = last()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        y = self.down(self.up(x).relu())
        return self.head(self.last(x + y if self.residual else y))


def _plan(stream: Any, style: Local2D, after: Any = None) -> dict[str, Any]:
    return {
        "embed": Rowwise2D(output_layouts=stream),
        "up": Colwise2D(input_layouts=stream),
        "down": Rowwise2D(output_layouts=stream),
        "last": style,
        "head": Colwise2D(input_layouts=stream if after is None else after, use_local_output=False),
    }


def _ids(batch: int, length: int) -> Tensor:
    return torch.randint(0, VOCAB, (batch, length), generator=torch.Generator().manual_seed(1))


def _pair(module: nn.Module, mesh: DeviceMesh, plan: Any) -> tuple[nn.Module, nn.Module]:
    reference = module.double()
    return reference, parallelize_module(copy.deepcopy(reference), mesh, plan)


def _differs(reference: nn.Module, model: nn.Module, *given: Tensor) -> dict[str, float]:
    """Relative differences of the output and of all gradients, for a model that gives a DTensor."""
    theirs, ours = (given[0], given[-1])
    for part in (reference, model):
        part.zero_grad()
    wanted, y = reference(theirs), model(ours)
    assert isinstance(y, DTensor) and y.shape == wanted.shape, y.shape
    wanted.sin().square().sum().backward()
    y.sin().square().sum().full_tensor().backward()
    return {"output": relative(whole(y), wanted.detach())} | gradients(reference, model)


def _split_tokens(rows: int, columns: int, compiled: bool) -> dict[str, float]:
    mesh, found = grid_mesh(rows, columns), {}
    cases = (Scale, True), (Scale, False), (lambda: nn.LayerNorm(WIDTH), True)
    for make, residual in cases[:1] if compiled else cases:
        reference, model = _pair(Model(make, residual), mesh, _plan(Shard(1), Local2D()))
        if compiled:
            model.compile(backend="aot_eager")
        differs = _differs(reference, model, _ids(4, 6))
        with torch.no_grad():
            y = whole(model(_ids(4, 6)))
            differs["without gradients"] = relative(y, reference(_ids(4, 6)))
        case = f"{type(model.last).__name__} {residual}"
        found |= {f"{case} {name}": value for name, value in differs.items()}
    return found


@pytest.mark.parametrize(
    "rows,columns,compiled",
    [(1, 2, False), (2, 2, False), deep(2, 3, False), deep(4, 1, False), deep(2, 2, True)],
)
def test_gradients_where_tokens_are_split(rows: int, columns: int, compiled: bool) -> None:
    """In a stream of split tokens the gradients of its parameters were not summed along tp_col.

    Only the very tensor that a Rowwise2D hands on was recognised, and neither the graph nor the
    plan was asked about what the user's code made of it.
    """
    no_difference(world.run(rows * columns, _split_tokens, rows, columns, compiled), 1e-10)


def _taken_for_whole() -> list[str]:
    mesh, said = grid_mesh(1, 2), []
    for residual in (False, True):
        pair = Shard(0), Replicate()
        for style in (Local2D(), Local2D(input_layouts=Replicate()), Local2D(input_layouts=pair)):
            _, model = _pair(Model(Pool, residual), mesh, _plan(Shard(1), style, Replicate()))
            try:
                model(_ids(4, 6))
                said.append("ran")
            except ValueError as error:
                said.append(str(error))
    return said


def test_tokens_that_are_split_are_not_taken_for_whole() -> None:
    """A mean over the tokens was that of a rank's own, in silence: only DTensors were checked.

    What the user's code made of a styled output has the layout that the user declares by a pair.
    """
    for plain, declared, pair, residual, made, own_word in world.run(2, _taken_for_whole):
        for message in (plain, residual):
            assert "Pool(scale (6,)) on mesh (tp_row=1, tp_col=2) was given a" in message
            assert "shape (4, 3, 6) in layout (Shard(dim=0), Shard(dim=1))" in message
            assert "gave one of shape (4, 6)" in message and "output_layouts" in message
        for message in (declared, pair):
            assert "takes a local tensor in layout (Shard(dim=0), Replicate())" in message
            assert "the module before it hands on one of shape (4, 3, 6)" in message
        assert "of which each rank has a part along tp_col" in made
        assert own_word == "ran"


class Shifted(Scale):
    def forward(self, x: Tensor) -> Tensor:
        before = F.pad(x, (0, 0, 1, 0))[:, :-1]
        return super().forward(x) + before


class Softmaxed(Scale):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).flip(1).softmax(1)


class Doubled(torch.autograd.Function):
    times = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        Doubled.times += 1
        return 2 * grad


class Own(Scale):
    """What runs in its backward is the user's, and may not run twice."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(Doubled.apply(x))


class Outside(nn.Module):
    """One whose graph is made again for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Scale()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return y


def _mixed() -> list[str]:
    mesh, said = grid_mesh(1, 2), []
    for module, length in (
        *((Shifted, 6), (Softmaxed, 6), (Shifted, 3)),
        *((kind, 6) for kind in (Scale, Viewed, Checkpointed, Outside, Own)),
    ):
        plan = _plan(Shard(1), Local2D())
        if module is Outside:
            plan["last.inner"] = plan.pop("last")
        reference, model = _pair(Model(module), mesh, plan)
        try:
            differs = _differs(reference, model, _ids(4, length))
            said.append(f"differs by {max(differs.values()) > 1e-10}")
        except ValueError as error:
            said.append(str(error))
    # One by the reference, one by the model.
    return [*said, f"{Doubled.times} times"]


def test_tokens_that_are_mixed_are_refused() -> None:
    """Of split tokens each rank mixed its own: loss and gradients were others, and nothing said so.

    The sizes tell nothing where as many tokens come out. What follows an output back to the input
    does; debug mode alone asked that. Of three tokens the second column has one, which tells
    nothing there: it has to hear of the first's.
    """
    for *mixed, scale, viewed, inside, outside, own, times in world.run(2, _mixed):
        for message in mixed:
            assert "mixes the tokens of dim 1" in message and "tp_col=2" in message
            assert "torch_tp2d.Replicate()" in message
        assert {scale, viewed, inside, outside, own} == {"differs by False"}
        assert len(mixed) == 3 and times == "2 times"


def _as_many_by_chance() -> str:
    mesh = grid_mesh(1, 2)
    _, model = _pair(Model(PoolKept), mesh, _plan(Shard(1), Local2D()))
    try:
        model(_ids(4, 3))
    except ValueError as error:
        return str(error)
    return "ran"


def test_an_output_that_has_the_tokens_of_the_input_on_one_rank() -> None:
    """Of three tokens the second column has one, and so has a mean that keeps its dim.

    The first column raised; the second took the mean for its tokens, and waited for the first.
    """
    for message, mine in zip(world.run(2, _as_many_by_chance), (2, 1), strict=True):
        assert "PoolKept(scale (6,)) on mesh (tp_row=1, tp_col=2) was given a" in message
        assert f"local tensor of shape (4, {mine}, 6)" in message
        assert "gave one of shape (4, 1, 6)" in message and "on every other rank" in message


def test_a_root_of_zero_mixes_no_tokens() -> None:
    """The gradient of every other token, zero, is NaN there: it was taken for one."""
    x = torch.zeros(2, 3, 4, requires_grad=True)
    assert not mixes(x, x.sqrt(), 1)
    assert mixes(x, x.cumsum(1), 1)
    assert mixes(x, x.flip(1).cumsum(1).flip(1), 1)
    # What is broadcast gets the sum of its gradients, by the engine and not by the node.
    assert mixes(x, x - x.mean(1, keepdim=True), 1) and not mixes(x, x - x.mean(2, True), 1)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.down(self.up(x)))


def _tokens_as_dtensors(rows: int, columns: int) -> dict[str, float]:
    mesh, found = grid_mesh(rows, columns), {}
    for declared in (None, Shard(1)):
        plan = {
            "up": Colwise2D(),
            "down": Rowwise2D(output_layouts=Shard(1)),
            "norm": Local2D(input_layouts=declared, use_local_output=False),
        }
        reference, model = _pair(Normed(), mesh, plan)
        for batch, length in ((4, 6), (5, 7)):
            x = noise(batch, length, WIDTH)
            differs = _differs(reference, model, x, spread(x, mesh, ROW).to_local())
            found |= {f"{declared} {batch} {name}": value for name, value in differs.items()}
    return found


@pytest.mark.parametrize("rows,columns", [(2, 2), deep(1, 4), deep(4, 1)])
def test_split_tokens_become_a_dtensor_of_split_tokens(rows: int, columns: int) -> None:
    """A DTensor of a rank's tokens was of as many as the rank has, and loss differed by rank.

    Its output was taken to be whole along tp_col, whatever was given or declared.
    """
    no_difference(world.run(rows * columns, _tokens_as_dtensors, rows, columns), 1e-10)


def _same_on_every_row() -> str:
    mesh = grid_mesh(2, 1)
    plan = {"0": Colwise2D(output_layouts=(Replicate(), Replicate())), "1": Local2D()}
    model = parallelize_module(nn.Sequential(nn.Linear(WIDTH, WIDTH), Scale()), mesh, plan)
    with pytest.raises(ValueError) as error:
        model(spread(noise(4, 3, WIDTH).float(), mesh, ROW).to_local())
    return str(error.value)


def test_what_is_the_same_on_every_row_is_not_summed() -> None:
    """Gradients were as many times too large as there are rows: no local input was checked."""
    for message in world.run(2, _same_on_every_row):
        assert "Scale(scale (6,)) on mesh (tp_row=2, tp_col=1)" in message
        assert "the same on every row" in message and "input_layouts=(Replicate()" in message


def _rows_without_samples(batch: int, rows: int) -> dict[str, float]:
    mesh, found = grid_mesh(rows, 1), {}
    x = noise(batch, 5, WIDTH)
    for sizes in (None, (batch, 5)):
        for local in (None, True):
            style = Local2D(use_local_output=local)
            reference, model = _pair(Viewed(), mesh, style)
            with torch_tp2d.token_sizes(mesh, sizes):
                y, wanted = model(spread(x, mesh, ROW)), reference(x)
                if local:
                    # Without token sizes nothing stands in any more for what the row lacks.
                    mine = spread(wanted.detach(), mesh, ROW).to_local()
                    y = y[: len(mine)] if sizes else y
                    assert not isinstance(y, DTensor) and len(y) == len(mine)
                    y.square().sum().backward()
                else:
                    assert y.shape == wanted.shape
                    y.square().sum().full_tensor().backward()
                wanted.square().sum().backward()
            found |= {f"{sizes} {local} {k}": v for k, v in gradients(reference, model).items()}
    return found


@pytest.mark.parametrize("batch,rows", [(3, 4), deep(1, 2)])
def test_a_row_without_samples_runs_on_one_that_stands_in(batch: int, rows: int) -> None:
    """Given a DTensor, a row without samples raised in the user's reshape; the others waited.

    The module was given the empty shard as it is.
    """
    no_difference(world.run(rows, _rows_without_samples, batch, rows), 1e-10)


def _outputs_of_tokens(batch: int) -> dict[str, float]:
    mesh, found = grid_mesh(2, 2), {}
    reference = nn.Sequential(nn.Embedding(VOCAB, WIDTH), Router())
    plan = {"0": Rowwise2D(output_layouts=Shard(1)), "1": Local2D(use_local_output=False)}
    reference, model = _pair(reference, mesh, plan)
    wanted, y = reference(_ids(batch, 5)), model(_ids(batch, 5))
    assert torch.equal(whole(y.rest["best"]), wanted.rest["best"])
    found["output"] = relative(whole(y.weights), wanted.weights.detach())
    y.weights.square().sum().full_tensor().backward()
    wanted.weights.square().sum().backward()
    return found | gradients(reference, model)


@pytest.mark.parametrize("batch", [1, 3])
def test_several_outputs_of_split_tokens(batch: int) -> None:
    """A router's choice of experts, without features, was of a rank's tokens or not handed on."""
    no_difference(world.run(4, _outputs_of_tokens, batch), 1e-10)


def _several_outputs() -> dict[str, float]:
    mesh, found = grid_mesh(2, 2), {}
    x = noise(4, 5, WIDTH)
    for given, style in (
        (spread(x, mesh, ROW), Local2D()),
        (spread(x, mesh, ROW).to_local(), Local2D(use_local_output=False)),
    ):
        reference, model = _pair(Router(), mesh, style)
        wanted, y = reference(x), model(given)
        assert type(y) is Chosen and y.rest["name"] == "router" and y.rest["none"] is None
        assert torch.equal(whole(y.rest["best"]), wanted.rest["best"])
        loss = y.weights.square().mean() + y.rest["all"][0].sum()
        loss.full_tensor().backward()
        (wanted.weights.square().mean() + wanted.rest["all"][0].sum()).backward()
        kind = type(given).__name__
        found |= {f"{kind} {name}": value for name, value in gradients(reference, model).items()}
    _, model = _pair(Twice(), mesh, Local2D())
    with pytest.raises(TypeError, match="Twice.* gave a Pair, .*torch.export.register_dataclass"):
        model(spread(x, mesh, ROW))
    assert isinstance(model(spread(x, mesh, ROW).to_local()), Pair)
    return found


def test_several_outputs_become_dtensors() -> None:
    """A tuple raised an AttributeError: the output was taken for one tensor."""
    no_difference(world.run(4, _several_outputs), 1e-10)


def _odd_dtensors(rows: int, columns: int) -> dict[str, float]:
    mesh, found = grid_mesh(rows, columns), {}
    x = noise(4, 5, WIDTH)
    given = {"sub-mesh": feed(x, mesh, ROW, "sub-mesh")}
    placed = (Replicate() if rows == 1 else Shard(0)), (Shard(1) if columns == 1 else Replicate())
    given["axis of one rank"] = spread(x, mesh, placed)
    for kind, one in given.items():
        reference, model = _pair(Scale(), mesh, Local2D())
        differs = _differs(reference, model, x, one)
        found |= {f"{kind} {name}": value for name, value in differs.items()}
    if columns == 1:
        plan = {"0": SequenceParallel(), "1": Local2D()}
        reference, model = _pair(nn.Sequential(nn.LayerNorm(WIDTH), Scale()), mesh, plan)
        differs = _differs(reference, model, x, spread(x, mesh, TOKENS))
        found |= {f"SequenceParallel {name}": value for name, value in differs.items()}
    return found


@pytest.mark.parametrize("rows,columns", [(2, 2), (1, 2), (4, 1)])
def test_dtensors_on_the_sub_mesh_and_on_axes_of_one_rank(rows: int, columns: int) -> None:
    """A row's DTensor was taken for one of the whole batch: "this row has 1 of 2 samples".

    On an axis of one rank, where a placement says nothing, every one but the usual was refused, and
    so Local2D after SequenceParallel on N x 1.
    """
    no_difference(world.run(rows * columns, _odd_dtensors, rows, columns), 1e-10)


def _checkpointed(rows: int, columns: int) -> dict[str, float]:
    mesh, found = grid_mesh(rows, columns), {}
    all_of_it = torch_tp2d.Replicate(input_layouts=(Replicate(), Replicate()))
    for style, layout in ((Local2D(), ROW), (all_of_it, (Replicate(), Replicate()))):
        for reentrant in (False, True):
            if reentrant and style is all_of_it:
                continue
            module = Checkpointed()
            module.reentrant = reentrant
            reference, model = _pair(module, mesh, style)
            x = noise(4, 5, WIDTH)
            theirs, ours = x.clone().requires_grad_(), feed(x, mesh, layout, "local")
            for part, leaf in ((reference, theirs), (model, ours)):
                for _ in range(2):
                    y = part(leaf) + part(leaf * 2)
                    y.square().sum().backward()
            assert "scale" not in vars(model) and isinstance(model.scale, DTensor)
            mine = spread(theirs.grad, mesh, layout).to_local()
            case = f"{type(style).__name__} {reentrant}"
            found[f"{case} input"] = relative(ours.grad, mine)
            found |= {f"{case} {k}": v for k, v in gradients(reference, model).items()}
    return found


@pytest.mark.parametrize("rows,columns", [(2, 2), deep(1, 2)])
def test_checkpointing_inside_a_module_that_runs_locally(rows: int, columns: int) -> None:
    """The recomputation met the parameters as DTensors: "mixed torch.Tensor and DTensor".

    The local ones were in place during forward only.
    """
    no_difference(world.run(rows * columns, _checkpointed, rows, columns), 1e-10)


class Broken(Scale):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        torch._dynamo.graph_break()
        return F.gelu(super().forward(y))


def _compiled(kinds: tuple[str, ...]) -> dict[str, float]:
    mesh, found = grid_mesh(2, 1), {}
    for kind in kinds:
        last = {"fullgraph": Scale, "broken": Broken, "checkpointed": Checkpointed}[kind]
        reference, model = _pair(last(), mesh, Local2D())
        model.compile(backend="aot_eager", fullgraph=kind == "fullgraph")
        x = noise(4, 5, WIDTH)
        for step in range(2):
            ours, theirs = feed(x, mesh, ROW, "local"), x.clone().requires_grad_()
            model(ours).square().sum().backward()
            reference(theirs).square().sum().backward()
            mine = spread(theirs.grad, mesh, ROW).to_local()
            found[f"{kind} {step} input"] = relative(ours.grad, mine)
            found |= {f"{kind} {step} {k}": v for k, v in gradients(reference, model).items()}
    return found


@pytest.mark.parametrize("kinds", [deep(("fullgraph", "broken")), deep(("checkpointed",))])
def test_compiled(kinds: tuple[str, ...]) -> None:
    """With fullgraph it raised; otherwise backward did, "guessed its metadata incorrectly".

    Dynamo cannot trace object.__delattr__, by which the local parameters were taken out of place,
    and ran what sums their gradients outside the graph, from where a deferred sum came into it.
    """
    no_difference(world.run(2, _compiled, kinds), 1e-10)
