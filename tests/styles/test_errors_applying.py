"""Mistakes that show when a plan is applied: refused on every rank, with the way out of each.

One process pretends to be each rank of the mesh in turn, on a process group that sends nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, SequenceParallel
from torch.distributed.tensor.parallel import parallelize_module as stock_parallelize_module

import torch_tp2d
from support.fake import NAMES, mesh_of, pretend
from support.mistakes import MEND_MESH, Silence, SmallModel, refused
from torch_tp2d import Block2DParallel, Colwise2D, Lifted, Norm2D, Rowwise2D, parallelize_module


def test_the_silence_notices_what_is_sent() -> None:
    """The check of the checks: a plan without a mistake sends its weights."""
    with pretend(1, 4):
        mesh = mesh_of(2, 2)
        with pytest.raises(AssertionError, match="ran before the mistake"), Silence():
            parallelize_module(nn.Linear(4, 4), mesh, Colwise2D())


# Meshes.


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
        with pytest.raises(ValueError, match=r"rank 3 is not on the mesh .*\[0, 1\]"), Silence():
            parallelize_module(nn.Linear(4, 4), mesh, Colwise2D())


# Plans and modules.


class _OwnForward(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class _Tied(SmallModel):
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
        SmallModel,
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
        SmallModel,
        lambda: {"layers.0": Colwise2D()},
        TypeError,
        ("'layers.0'", "Heads(wq.weight (12, 12)", "name the Linear modules inside it"),
    ),
    Mistake(
        "stock colwise on a norm",
        SmallModel,
        lambda: {"norm": ColwiseParallel()},
        TypeError,
        ("'norm'", "LayerNorm((12,)", "Norm2D"),
    ),
    Mistake(
        "block on an embedding",
        SmallModel,
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
        for style in (Rowwise2D, Colwise2D, torch_tp2d.Replicate)
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
            SmallModel,
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
        SmallModel,
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
        SmallModel,
        lambda: {"layers.1.wq": ColwiseParallel(), "layers.1.wk": ColwiseParallel()},
        ValueError,
        ("'layers.1.wk'", "2 heads of 4", "tp_row=1, tp_col=3", "divides 2"),
        (1, 3),
    ),
    # Keys.
    Mistake(
        "a key that matches nothing",
        SmallModel,
        lambda: {"layer.0.wq": Colwise2D()},
        ValueError,
        ("'layer.0.wq'", "SmallModel", "layers.0.wq"),
    ),
    Mistake(
        "a glob that matches nothing",
        SmallModel,
        lambda: {"layers.*.w9": Colwise2D()},
        ValueError,
        ("'layers.*.w9'", "layers."),
    ),
    Mistake(
        "a nested key that matches nothing",
        SmallModel,
        lambda: {"layers.*": {"wqq": Colwise2D()}},
        ValueError,
        ("wqq", "wq"),
    ),
    Mistake(
        "two entries for one module",
        SmallModel,
        lambda: {"head": Colwise2D(), "hea?": Rowwise2D()},
        ValueError,
        ("'head'", "'hea?'", "Linear(in_features=12", "keep one"),
    ),
    # Styles.
    Mistake(
        "a style of the user's own",
        SmallModel,
        lambda: {"head": _OwnStyle()},
        TypeError,
        ("'head'", "_OwnStyle", "ColwiseParallel", "GridStyle"),
    ),
    Mistake(
        "a style's class",
        SmallModel,
        lambda: {"head": Colwise2D},
        TypeError,
        ("'head'", "Colwise2D"),
    ),
    Mistake(
        "a plan that is a list", SmallModel, lambda: [Colwise2D()], TypeError, ("list", "dict")
    ),
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
        model, mesh = SmallModel(), mesh_of(2, 2)
        plan = {"embed": Rowwise2D(), "norm": SequenceParallel(), "head": Norm2D()}
        with pytest.raises(TypeError, match="'head'"), Silence():
            parallelize_module(model, mesh, plan)
        assert not any(isinstance(param, DTensor) for param in model.parameters())
        assert type(model.embed) is nn.Embedding


def test_heads_that_do_not_divide_pass_as_dtensors() -> None:
    with pretend(1, 4):
        model = SmallModel()
        plan = {"layers.*.wq": Colwise2D(use_local_output=False), "layers.*.wk": Colwise2D()}
        parallelize_module(model, mesh_of(2, 2), plan)
        assert isinstance(model.layers[0].wq.weight, DTensor)


def test_heads_may_be_gathered() -> None:
    """An output that is whole, or split over tokens, splits no head."""
    for layout in (Replicate(), Shard(1)):
        with pretend(1, 4):
            model = SmallModel()
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
        # Not that a style is not iterable, of one that is called as a placement is.
        (
            lambda: Colwise2D(input_layouts=torch_tp2d.Replicate()),
            TypeError,
            ("Placements of torch.distributed.tensor", "Replicate"),
        ),
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
        (
            lambda: Colwise2D(reduce_dtype=torch.float32, algorithm="cannon"),
            ValueError,
            ("'cannon'", '"pipelined"', "reduce_dtype"),
        ),
        (lambda: Rowwise2D(reduce_dtype=torch.int32), ValueError, ("floating", "int32")),
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


def test_messages_name_no_object_by_its_address() -> None:
    """Every plan's message once more, for what a reader can do nothing with."""
    for mistake in MISTAKES:
        with pretend(0, torch.Size(mistake.shape).numel()):
            with pytest.raises(mistake.kind) as caught:
                parallelize_module(mistake.model(), mesh_of(*mistake.shape), mistake.plan())
        if mistake.name not in ("a style of the user's own", "a style's class"):
            assert not re.search(r"object at 0x", str(caught.value)), mistake.name


class _Attention(nn.Module):
    num_heads = 4

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(8, 24), nn.Linear(8, 8)


@pytest.mark.parametrize("local", [True, False])
def test_attention_of_its_own_over_parts_of_sequences(local: bool) -> None:
    """Each row attended to its own keys: a random program's output was wrong, without an error."""

    def make() -> Callable[[], Any]:
        mesh, model = mesh_of(2, 2), nn.ModuleDict({"attention": _Attention()})
        plan = {
            "attention.qkv": Colwise2D(parts=3, row_dim=1),
            "attention.o": Rowwise2D(row_dim=1, use_local_output=local),
        }
        return lambda: parallelize_module(model, mesh, plan)

    refused((2, 2), ValueError, ("'attention'", "tp_row=2", "Attention2D(row_dim=1)"), make)


class _Sinks(_Attention):
    """An attention with scores of its own for each head."""

    def __init__(self) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.zeros(3))


@pytest.mark.parametrize(
    "own,words",
    [
        (None, ("sinks", "(3,)", "own_parameters={name: ", "heads")),
        ({"sinks": ("heads", None)}, ("sinks", "('heads', None)", "(3,)")),
        ({"sinks": (None,), "sink": (None,)}, ("'sink'", "'sinks': (3,)")),
        ({"sinks": ("heads",)}, ("sinks (3,)", "do not divide over tp_col", "tp_col=2")),
    ],
)
def test_own_parameters_of_an_attention(own: Any, words: tuple[str, ...]) -> None:
    """They belong to the module that Attention2D is for, so no other entry can name them."""

    def make() -> Callable[[], Any]:
        plan = {
            "": torch_tp2d.Attention2D(own_parameters=own),
            "qkv": Colwise2D(parts=3),
            "o": Rowwise2D(),
        }
        return lambda: parallelize_module(_Sinks(), mesh_of(2, 2), plan)

    refused((2, 2), ValueError, words, make)
