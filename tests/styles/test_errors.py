"""Mistakes: each is refused on every rank, before anything is sent, with the way out of it.

One process pretends to be each rank of the mesh in turn, on a process group that sends nothing.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    SequenceParallel,
)
from torch.distributed.tensor.parallel import parallelize_module as stock_parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import torch_tp2d
from torch_tp2d import (
    Block2DParallel,
    Colwise2D,
    Lifted,
    Norm2D,
    Rowwise2D,
    cross_entropy,
    parallelize_module,
)

NAMES = ("tp_row", "tp_col")


class _Silence(TorchDispatchMode):
    """Fails if anything is sent."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            raise AssertionError(f"{func} ran before the mistake was found")
        return func(*args, **(kwargs or {}))


@contextmanager
def pretend(rank: int, world_size: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def mesh_of(*shape: int, names: tuple[str, ...] = NAMES) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def refused(
    shape: tuple[int, ...],
    kind: type[Exception],
    words: tuple[str, ...],
    make: Callable[[], Callable[[], Any]],
) -> None:
    """On every rank of a mesh of ``shape``, what ``make`` returns raises and sends nothing."""
    size = torch.Size(shape).numel()
    for rank in range(size):
        with pretend(rank, size):
            act = make()
            with pytest.raises(kind) as caught, _Silence():
                act()
        message = str(caught.value)
        missing = [word for word in words if word not in message]
        assert type(caught.value) is kind
        assert not missing, f"rank {rank}: {missing} is not in: {message}"


def test_the_silence_notices_what_is_sent() -> None:
    """The check of the checks: a plan without a mistake sends its weights."""
    with pretend(1, 4):
        mesh = mesh_of(2, 2)
        with pytest.raises(AssertionError, match="ran before the mistake"), _Silence():
            parallelize_module(nn.Linear(4, 4), mesh, Colwise2D())


# Meshes.

MEND_MESH = ('init_device_mesh(device, (R, C), mesh_dim_names=("tp_row", "tp_col"))',)


@pytest.mark.parametrize("apply", [parallelize_module, stock_parallelize_module])
@pytest.mark.parametrize("style", [Colwise2D, Norm2D, torch_tp2d.Replicate])
@pytest.mark.parametrize(
    "shape,names,words",
    [
        ((4,), ("tp_col",), ("2-D mesh", "(tp_col=4)")),
        ((2, 1, 2), ("dp", *NAMES), ("2-D mesh", "(dp=2, tp_row=1, tp_col=2)", "slice")),
        ((2, 2), ("dp", "tp"), ("in this order", "(dp=2, tp=2)")),
        ((2, 2), ("tp_col", "tp_row"), ("in this order", "(tp_col=2, tp_row=2)")),
        ((2, 2), None, ("(dim0=2, dim1=2)",)),
    ],
    ids=["1-D", "3-D", "wrong names", "wrong order", "no names"],
)
def test_meshes(
    shape: tuple[int, ...], names: Any, words: tuple[str, ...], style: Any, apply: Any
) -> None:
    def make() -> Callable[[], Any]:
        mesh = mesh_of(*shape, names=names)
        module = nn.LayerNorm(4) if style is Norm2D else nn.Linear(4, 4)
        return lambda: apply(module, mesh, style())

    refused(shape, ValueError, (*words, *MEND_MESH), make)


@pytest.mark.parametrize(
    "ranks,style",
    [
        ([[1, 0], [3, 2]], Colwise2D()),
        ([[2, 3], [0, 1]], Colwise2D()),
        ([[0, 2], [1, 3]], Lifted(ColwiseParallel(), axes=NAMES)),
    ],
    ids=["along tp_col", "along tp_row", "on both"],
)
def test_ranks_out_of_order(ranks: list[list[int]], style: Any) -> None:
    """A group numbers its ranks in ascending order, whatever the mesh says: shards got mixed up."""

    def make() -> Callable[[], Any]:
        mesh = DeviceMesh("cpu", ranks, mesh_dim_names=NAMES)
        return lambda: parallelize_module(nn.Linear(4, 4), mesh, style)

    refused((2, 2), ValueError, ("ascend", str(ranks), *MEND_MESH), make)


def test_no_mesh() -> None:
    for mesh in (None, "cpu", (2, 2)):

        def make(mesh: Any = mesh) -> Callable[[], Any]:
            return lambda: parallelize_module(nn.Linear(4, 4), mesh, Colwise2D())

        kind = RuntimeError if mesh is None else TypeError
        words = () if mesh is None else ("DeviceMesh", type(mesh).__name__, *MEND_MESH)
        refused((2, 2), kind, words, make)


def test_a_rank_that_is_not_on_the_mesh() -> None:
    with pretend(3, 4):
        mesh = DeviceMesh("cpu", [[0, 1]], mesh_dim_names=NAMES)
        with pytest.raises(ValueError, match=r"rank 3 is not on the mesh .*\[0, 1\]"), _Silence():
            parallelize_module(nn.Linear(4, 4), mesh, Colwise2D())


# Plans and modules.


class _OwnForward(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class _Heads(nn.Module):
    """Projects into 3 heads of 4, or into 2 for keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim = 4
        self.wq, self.wk, self.wo = nn.Linear(12, 12), nn.Linear(12, 8), nn.Linear(12, 12)


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 12)
        self.layers = nn.ModuleList([_Heads(), _Heads()])
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, 10, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.embed(x)))


class _Tied(_Model):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


class _OwnStyle(ParallelStyle):
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return module


class _TwiceNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class _L2Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / x.norm(dim=-1, keepdim=True)


def _integer_linear() -> nn.Module:
    module = nn.Linear(4, 4)
    module.weight = nn.Parameter(torch.ones(4, 4, dtype=torch.int8), requires_grad=False)
    return module


def _embedding(**options: Any) -> Callable[[], nn.Module]:
    return lambda: nn.Embedding(10, 4, **options)


@dataclass(frozen=True)
class Mistake:
    """A plan for a model that is refused, and what the message has to say."""

    name: str
    model: Callable[[], nn.Module]
    plan: Callable[[], Any]
    kind: type[Exception]
    words: tuple[str, ...]
    shape: tuple[int, int] = (2, 2)


def _linear() -> nn.Module:
    return nn.Linear(6, 4)


LINEAR = "Linear(in_features=6, out_features=4"

MISTAKES = [
    # A style on the wrong module.
    Mistake(
        "colwise on a norm",
        _Model,
        lambda: {"norm": Colwise2D()},
        TypeError,
        ("'norm'", "Colwise2D is for nn.Linear", "LayerNorm((12,)", "tp_row=2, tp_col=2", "Norm2D"),
    ),
    Mistake(
        "rowwise on a Linear with its own forward",
        lambda: _OwnForward(6, 4),
        lambda: Rowwise2D(),
        TypeError,
        ("the module itself", "_OwnForward(in_features=6", "their own forward", "Replicate"),
    ),
    Mistake(
        "colwise on a model",
        _Model,
        lambda: {"layers.0": Colwise2D()},
        TypeError,
        ("'layers.0'", "_Heads(wq.weight (12, 12)", "name the Linear modules inside it"),
    ),
    Mistake(
        "stock colwise on a norm",
        _Model,
        lambda: {"norm": ColwiseParallel()},
        TypeError,
        ("'norm'", "LayerNorm((12,)", "Norm2D"),
    ),
    Mistake(
        "block on an embedding",
        _Model,
        lambda: {"embed": Block2DParallel()},
        TypeError,
        ("'embed'", "Embedding(10, 12)", "tp_row=2, tp_col=2", "use Rowwise2D or Colwise2D"),
    ),
    *(
        Mistake(
            f"Norm2D on {name}",
            model,
            Norm2D,
            TypeError,
            ("LayerNorm or RMSNorm", name, "tp_row=2, tp_col=2", "SequenceParallel or Replicate"),
        )
        for name, model in (
            ("Linear", _linear),
            ("GroupNorm", lambda: nn.GroupNorm(2, 4)),
            ("BatchNorm1d", lambda: nn.BatchNorm1d(4)),
            ("LayerNorm((3, 4)", lambda: nn.LayerNorm((3, 4))),
            ("_TwiceNorm", lambda: _TwiceNorm(4)),
            ("_L2Norm", _L2Norm),
            ("Dropout", nn.Dropout),
        )
    ),
    # Parameters.
    *(
        Mistake(
            f"integer weights under {type(style).__name__}",
            _integer_linear,
            lambda style=style: style,
            TypeError,
            ("Linear(", "weight", "torch.int8", "leave the module out"),
        )
        for style in (Colwise2D(), Rowwise2D(), torch_tp2d.Replicate(), ColwiseParallel())
    ),
    *(
        Mistake(
            f"embedding with {next(iter(option))}",
            _embedding(**option),
            lambda style=style: style(),
            ValueError,
            ("Embedding(10, 4", next(iter(option)), "make it without"),
        )
        for style in (Rowwise2D, Colwise2D)
        for option in ({"max_norm": 1.0}, {"sparse": True}, {"scale_grad_by_freq": True})
    ),
    Mistake(
        "an algorithm for an embedding",
        _embedding(),
        lambda: Rowwise2D(algorithm="summa"),
        ValueError,
        ("Embedding(10, 4)", "'summa'", "leave it out"),
    ),
    # Square algorithms.
    *(
        Mistake(
            f"{algorithm} on an oblong grid",
            _Model,
            lambda algorithm=algorithm: {"head": Colwise2D(algorithm=algorithm)},
            ValueError,
            ("'head'", "Linear(in_features=12", algorithm, "square", "tp_row=2, tp_col=3", "summa"),
            (2, 3),
        )
        for algorithm in ("bmr", "cannon")
    ),
    # Heads.
    Mistake(
        "three heads over two columns",
        _Model,
        lambda: {"layers.*.wq": Colwise2D()},
        ValueError,
        (
            "'layers.0.wq'",
            "Linear(in_features=12, out_features=12",
            "3 heads of 4",
            "tp_row=2, tp_col=2",
            "use_local_output=False",
        ),
    ),
    Mistake(
        "two kv heads over three columns, stock",
        _Model,
        lambda: {"layers.1.wq": ColwiseParallel(), "layers.1.wk": ColwiseParallel()},
        ValueError,
        ("'layers.1.wk'", "2 heads of 4", "tp_row=1, tp_col=3", "divides 2"),
        (1, 3),
    ),
    # Keys.
    Mistake(
        "a key that matches nothing",
        _Model,
        lambda: {"layer.0.wq": Colwise2D()},
        ValueError,
        ("'layer.0.wq'", "_Model", "layers.0.wq"),
    ),
    Mistake(
        "a glob that matches nothing",
        _Model,
        lambda: {"layers.*.w9": Colwise2D()},
        ValueError,
        ("'layers.*.w9'", "layers."),
    ),
    Mistake(
        "a nested key that matches nothing",
        _Model,
        lambda: {"layers.*": {"wqq": Colwise2D()}},
        ValueError,
        ("wqq", "wq"),
    ),
    Mistake(
        "two entries for one module",
        _Model,
        lambda: {"head": Colwise2D(), "hea?": Rowwise2D()},
        ValueError,
        ("'head'", "'hea?'", "Linear(in_features=12", "keep one"),
    ),
    # Styles.
    Mistake(
        "a style of the user's own",
        _Model,
        lambda: {"head": _OwnStyle()},
        TypeError,
        ("'head'", "_OwnStyle", "ColwiseParallel", "GridStyle"),
    ),
    Mistake(
        "a style's class", _Model, lambda: {"head": Colwise2D}, TypeError, ("'head'", "Colwise2D")
    ),
    Mistake("a plan that is a list", _Model, lambda: [Colwise2D()], TypeError, ("list", "dict")),
    # Ties.
    Mistake(
        "tied modules in different layouts",
        _Tied,
        lambda: {"embed": Colwise2D(), "head": Colwise2D()},
        ValueError,
        (
            "'head'",
            "Linear(in_features=12",
            "tied",
            "tp_row=2, tp_col=2",
            "an embedding Rowwise2D and its head Colwise2D",
        ),
    ),
    Mistake(
        "a tied head under a stock style",
        _Tied,
        lambda: {"embed": Rowwise2D(), "head": ColwiseParallel()},
        ValueError,
        ("'head'", "tied", "Replicate()"),
    ),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_plans(mistake: Mistake) -> None:
    def make() -> Callable[[], Any]:
        mesh, model = mesh_of(*mistake.shape), mistake.model()
        before = list(model.parameters())

        def act() -> None:
            try:
                parallelize_module(model, mesh, mistake.plan())
            finally:
                # Refused whole: no module has changed.
                after = list(model.parameters())
                assert all(a is b for a, b in zip(after, before, strict=True))

        return act

    refused(mistake.shape, mistake.kind, mistake.words, make)


@pytest.mark.parametrize(
    "mistake",
    [m for m in MISTAKES if m.name.startswith(("rowwise on", "Norm2D on", "embedding", "integer"))],
    ids=lambda mistake: mistake.name,
)
def test_torchs_own_parallelize_module_refuses_them_as_well(mistake: Mistake) -> None:
    """On a module and its one style; what concerns a whole plan, only ours can see."""
    style = mistake.plan()
    if isinstance(style, ColwiseParallel):
        return
    words = tuple(word for word in mistake.words if "tp_row" not in word and "itself" not in word)

    def make() -> Callable[[], Any]:
        mesh, model = mesh_of(*mistake.shape), mistake.model()
        return lambda: stock_parallelize_module(model, mesh, style)

    refused(mistake.shape, mistake.kind, words, make)


def test_a_mistake_late_in_the_plan_leaves_the_whole_model_alone() -> None:
    with pretend(0, 4):
        model, mesh = _Model(), mesh_of(2, 2)
        plan = {"embed": Rowwise2D(), "norm": SequenceParallel(), "head": Norm2D()}
        with pytest.raises(TypeError, match="'head'"), _Silence():
            parallelize_module(model, mesh, plan)
        assert not any(isinstance(param, DTensor) for param in model.parameters())
        assert type(model.embed) is nn.Embedding


def test_heads_that_do_not_divide_pass_as_dtensors() -> None:
    with pretend(1, 4):
        model = _Model()
        plan = {"layers.*.wq": Colwise2D(use_local_output=False), "layers.*.wk": Colwise2D()}
        parallelize_module(model, mesh_of(2, 2), plan)
        assert isinstance(model.layers[0].wq.weight, DTensor)


def test_heads_may_be_gathered() -> None:
    """An output that is whole, or split over tokens, splits no head."""
    for layout in (Replicate(), Shard(1)):
        with pretend(1, 4):
            model = _Model()
            parallelize_module(
                model, mesh_of(2, 2), {"layers.*.wq": Colwise2D(output_layouts=layout)}
            )


@pytest.mark.parametrize(
    "style,kind,words",
    [
        (lambda: Colwise2D(algorithm="sumo"), ValueError, ("'sumo'", "summa", "cannon")),
        (lambda: Colwise2D(dataflow="x"), ValueError, ("Colwise2D", "output_stationary", "'x'")),
        (
            lambda: Rowwise2D(dataflow="output_stationary"),
            ValueError,
            ("Rowwise2D", '"input_stationary"', "'output_stationary'"),
        ),
        (lambda: Block2DParallel(row_dim=2), ValueError, ("row_dim", "0 or 1", "2")),
        (lambda: Rowwise2D(row_dim=-1), ValueError, ("row_dim", "-1")),
        (lambda: Norm2D(row_dim=2), ValueError, ("row_dim", "0 or 1")),
        (lambda: torch_tp2d.Replicate(row_dim=2), ValueError, ("row_dim", "0 or 1")),
        (lambda: Lifted(ColwiseParallel(), row_dim=2), ValueError, ("row_dim", "0 or 1")),
        (lambda: Lifted(SequenceParallel(), row_dim=2), ValueError, ("row_dim", "0 or 1")),
        (lambda: Colwise2D(input_layouts="Shard(0)"), TypeError, ("Placement", "Shard(0)")),
        (
            lambda: Colwise2D(output_layouts=(Shard(0), Shard(1), Shard(2))),
            TypeError,
            ("tp_row", "tp_col"),
        ),
        (lambda: Rowwise2D(regather_input=True), ValueError, ("Rowwise2D", "Colwise2D")),
        (
            lambda: Colwise2D(regather_input=True, algorithm="summa"),
            ValueError,
            ("'summa'", '"pipelined"'),
        ),
        (lambda: Rowwise2D(output_layouts=Partial()), ValueError, ("Rowwise2D", "Partial")),
        (lambda: Lifted(_OwnStyle()), TypeError, ("_OwnStyle", "GridStyle")),
        (lambda: Lifted(Colwise2D()), TypeError, ("Colwise2D",)),
    ],
)
def test_options(style: Callable[[], Any], kind: type[Exception], words: tuple[str, ...]) -> None:
    with pytest.raises(kind) as caught:
        style()
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_positional_arguments_are_refused() -> None:
    for style in (Colwise2D, Rowwise2D, Block2DParallel, Norm2D, torch_tp2d.Replicate):
        with pytest.raises(TypeError, match="positional"):
            style(Shard(0))


def test_unknown_axes() -> None:
    def make() -> Callable[[], Any]:
        mesh, module = mesh_of(2, 2), nn.Linear(6, 4)
        style = Lifted(ColwiseParallel(), axes="tp")
        return lambda: parallelize_module(module, mesh, style)

    refused((2, 2), ValueError, ("'tp'", '("tp_row", "tp_col")', "tp_row=2, tp_col=2"), make)


# Parameters that are on a mesh already.


def test_fsdp_first() -> None:
    def make() -> Callable[[], Any]:
        mesh = mesh_of(2, 1, 2, names=("dp", *NAMES))
        model = nn.Sequential(nn.Linear(6, 4))
        fully_shard(model, mesh=mesh["dp"])
        plan = {"0": Colwise2D()}
        return lambda: parallelize_module(model, mesh[NAMES], plan)

    words = (
        "'0'",
        "weight of shape (4, 6)",
        "(dp=2)",
        "tp_row=1, tp_col=2",
        "apply the 2-D plan first, then fully_shard",
    )
    refused((2, 1, 2), ValueError, words, make)


def test_parameters_on_another_mesh() -> None:
    def make() -> Callable[[], Any]:
        mesh, other = mesh_of(2, 2), mesh_of(4, names=("tp",))
        module = nn.Linear(8, 4)
        stock_parallelize_module(module, other, ColwiseParallel())
        return lambda: parallelize_module(module, mesh, Rowwise2D())

    words = (LINEAR.replace("6", "8"), "weight", "(tp=4)", "tp_row=2, tp_col=2")
    refused((2, 2), ValueError, words, make)


def test_a_module_styled_before() -> None:
    for first, second in ((Colwise2D, Rowwise2D), (torch_tp2d.Replicate, Colwise2D)):

        def make(first: Any = first, second: Any = second) -> Callable[[], Any]:
            mesh, module = mesh_of(2, 2), nn.Linear(6, 4)
            parallelize_module(module, mesh, first())
            return lambda: parallelize_module(module, mesh, second())

        refused((2, 2), ValueError, ("Linear", "already", "one plan entry"), make)


def test_tied_modules_in_different_layouts_call_by_call() -> None:
    """Through torch's own call as well, which sees one module at a time."""
    for apply in (parallelize_module, stock_parallelize_module):

        def make(apply: Any = apply) -> Callable[[], Any]:
            mesh, model = mesh_of(2, 2), _Tied()
            apply(model, mesh, {"embed": Rowwise2D()})
            return lambda: apply(model, mesh, {"head": Rowwise2D()})

        refused((2, 2), ValueError, ("Linear(in_features=12", "tied", "Rowwise2D"), make)


# When the model runs.


def test_a_matrix_that_no_entry_names() -> None:
    """Refused every time: the check took itself off before it looked, and a second try ran."""

    def make() -> Callable[[], Any]:
        mesh, model = mesh_of(2, 2), _Model()
        parallelize_module(model, mesh, {"embed": Rowwise2D(), "norm": SequenceParallel()})
        ids = torch.zeros(2, 4, dtype=torch.long)

        def act() -> None:
            with pytest.raises(ValueError):
                model(ids)
            model(ids)

        return act

    words = ("_Model", "tp_row=2, tp_col=2", "(12, 12)", "torch_tp2d.Replicate()", "freeze it")
    refused((2, 2), ValueError, words, make)


def test_a_copy_is_checked_apart_from_its_original() -> None:
    """Running the copy took the check off the original."""

    def make() -> Callable[[], Any]:
        mesh, model = mesh_of(2, 2), _Model()
        parallelize_module(model, mesh, {"embed": Rowwise2D(), "norm": SequenceParallel()})
        ids = torch.zeros(2, 4, dtype=torch.long)
        twin = copy.deepcopy(model)

        def act() -> None:
            with pytest.raises(ValueError):
                twin(ids)
            model(ids)

        return act

    refused((2, 2), ValueError, ("no plan entry names",), make)


def test_a_frozen_matrix_may_be_left_out() -> None:
    with pretend(0, 4):
        model = _Model()
        model.layers.requires_grad_(False)
        plan = {"embed": Rowwise2D(), "head": Colwise2D(output_layouts=Shard(1))}
        parallelize_module(model, mesh_of(2, 2), plan)
        model(torch.zeros(2, 4, dtype=torch.long))


@pytest.mark.parametrize(
    "style", [Colwise2D, Rowwise2D, Block2DParallel, Norm2D, torch_tp2d.Replicate]
)
def test_an_input_on_another_mesh(style: Any) -> None:
    def make() -> Callable[[], Any]:
        mesh, other = mesh_of(2, 2), mesh_of(4, names=("dp",))
        module = nn.LayerNorm(4) if style is Norm2D else nn.Linear(4, 4)
        parallelize_module(module, mesh, {"": style()})
        x = distribute_tensor(torch.ones(4, 4, 4), other, [Shard(0)], src_data_rank=None)
        return lambda: module(x)

    words = ("(dp=4)", "tp_row=2, tp_col=2", "put both on one mesh, or pass a local tensor")
    refused((2, 2), ValueError, words, make)


@pytest.mark.parametrize("style", [Colwise2D, Block2DParallel, torch_tp2d.Replicate])
def test_a_shard_that_does_not_fit_the_tokens(style: Any) -> None:
    """8 tokens over 2 columns are 4 on a rank; the whole sequence was handed over instead."""

    def make() -> Callable[[], Any]:
        mesh, embed, module = mesh_of(2, 2), nn.Embedding(10, 4), nn.Linear(4, 4)
        parallelize_module(embed, mesh, Rowwise2D(output_layouts=Shard(1)))
        parallelize_module(module, mesh, style(input_layouts=Shard(1)))
        embed(torch.zeros(2, 8, dtype=torch.long))
        return lambda: module(torch.ones(1, 8, 4))

    words = ("dim 1", "(1, 8, 4)", "(2, 8)", "tp_row=2, tp_col=2", "or a DTensor")
    refused((2, 2), ValueError, words, make)


def test_a_model_without_ids_after_one_with_ids_on_the_same_mesh() -> None:
    """Token sizes are known per mesh: another model's local shards are refused, not mistaken."""

    def make() -> Callable[[], Any]:
        mesh, embed, other = mesh_of(2, 2), nn.Embedding(10, 4), nn.Linear(4, 4)
        parallelize_module(embed, mesh, Rowwise2D(output_layouts=Shard(1)))
        parallelize_module(other, mesh, Block2DParallel(input_layouts=Shard(1)))
        embed(torch.zeros(2, 8, dtype=torch.long))
        return lambda: other(torch.ones(3, 6, 4))

    refused((2, 2), ValueError, ["(3, 6, 4)", "tokens (2, 8)", "tp_row=2", "a DTensor"], make)


@pytest.mark.parametrize("together", [False, True])
def test_prepare_styles_that_do_not_fit_their_module(together: bool) -> None:
    class Two(nn.Module):
        def forward(self, x: Any, y: Any) -> Any:
            return x, y

    def make() -> Callable[[], Any]:
        mesh, module = mesh_of(2, 2), Two()
        if together:
            style: ParallelStyle = PrepareModuleOutput(
                output_layouts=(Shard(1),), desired_output_layouts=(Replicate(),)
            )
        else:
            style = PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            )
        parallelize_module(module, mesh, style)
        return lambda: module(torch.ones(2, 4, 4), 2)

    refused((2, 2), ValueError, ("Two", "2", "1"), make)


def test_a_layout_for_what_is_no_tensor() -> None:
    def make() -> Callable[[], Any]:
        mesh, module = mesh_of(2, 2), nn.Identity()
        style = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
        parallelize_module(module, mesh, style)
        return lambda: module("text")

    refused((2, 2), TypeError, ("layout", "str"), make)


def test_a_dtensor_with_fewer_tokens_than_rows() -> None:
    def make() -> Callable[[], Any]:
        mesh, module = mesh_of(4, 1), nn.Identity()
        style = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
        parallelize_module(module, mesh, Lifted(style, use_local_output=False))
        x = distribute_tensor(torch.ones(3, 4, 4), mesh, [Shard(0), Shard(1)], src_data_rank=None)
        return lambda: module(x)

    refused((4, 1), ValueError, ("(3, 4, 4)", "tp_row=4", "use_local_output=True"), make)


# The loss.


def _logits(mesh: DeviceMesh) -> DTensor:
    return distribute_tensor(torch.ones(4, 6, 10), mesh, [Shard(0), Shard(2)], src_data_rank=None)


@pytest.mark.parametrize(
    "logits,target,options,kind,words",
    [
        (
            lambda mesh: torch.ones(2, 6, 5),
            torch.zeros(4, 6, dtype=torch.long),
            {},
            TypeError,
            ("(2, 6, 5)", "use_local_output=False", "torch.nn.functional.cross_entropy"),
        ),
        (
            _logits,
            torch.zeros(4, 6, dtype=torch.long),
            {"reduction": "median"},
            ValueError,
            ("'median'", '"mean"', '"sum"', '"none"'),
        ),
        (
            _logits,
            torch.zeros(4, 6, dtype=torch.long),
            {"label_smoothing": 1.5},
            ValueError,
            ("label_smoothing", "1.5"),
        ),
        (
            _logits,
            torch.zeros(4, 5, dtype=torch.long),
            {},
            ValueError,
            ("(4, 5)", "(4, 6, 10)", "(4, 6)", "(2, 6)"),
        ),
        (_logits, torch.zeros(24, dtype=torch.long), {}, ValueError, ("(24,)", "(4, 6)")),
        (_logits, torch.zeros(4, 6), {}, TypeError, ("class ids", "torch.float32")),
        (_logits, torch.zeros(4, 6, dtype=torch.bool), {}, TypeError, ("torch.bool",)),
        (_logits, torch.zeros(4, 6, 10), {}, TypeError, ("class ids", "torch.float32")),
    ],
    ids=[
        "plain logits",
        "reduction",
        "smoothing",
        "target's shape",
        "flat target",
        "float target",
        "bool target",
        "probabilities",
    ],
)
def test_losses(
    logits: Callable[[DeviceMesh], Tensor],
    target: Tensor,
    options: dict[str, Any],
    kind: type[Exception],
    words: tuple[str, ...],
) -> None:
    def make() -> Callable[[], Any]:
        given = logits(mesh_of(2, 2))
        return lambda: cross_entropy(given, target, **options)

    refused((2, 2), kind, words, make)


def test_a_loss_on_other_meshes() -> None:
    def one_dim() -> Callable[[], Any]:
        mesh = mesh_of(4, names=("tp",))
        logits = distribute_tensor(torch.ones(4, 6, 8), mesh, [Shard(2)], src_data_rank=None)
        return lambda: cross_entropy(logits, torch.zeros(4, 6, dtype=torch.long))

    refused((4,), ValueError, ("(tp=4)", *MEND_MESH), one_dim)

    def target_elsewhere(shape: tuple[int, int]) -> Callable[[], Any]:
        logits, other = _logits(mesh_of(2, 2)), mesh_of(4, names=("tp",))
        ids = torch.zeros(*shape, dtype=torch.long)
        target = distribute_tensor(ids, other, [Shard(0)], src_data_rank=None)
        return lambda: cross_entropy(logits, target)

    for shape in ((4, 6), (4, 5)):
        refused(
            (2, 2),
            ValueError,
            (str(shape), "(4, 6)", "mesh"),
            lambda shape=shape: target_elsewhere(shape),
        )


def test_messages_name_no_object_by_its_address() -> None:
    """Every plan's message once more, for what a reader can do nothing with."""
    for mistake in MISTAKES:
        with pretend(0, torch.Size(mistake.shape).numel()):
            with pytest.raises(mistake.kind) as caught:
                parallelize_module(mistake.model(), mesh_of(*mistake.shape), mistake.plan())
        if mistake.name not in ("a style of the user's own", "a style's class"):
            assert not re.search(r"object at 0x", str(caught.value)), mistake.name
