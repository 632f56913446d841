"""Mistakes that show when the model runs, or its loss: refused on every rank, nothing is sent."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    SequenceParallel,
)

import torch_tp2d
from support.fake import mesh_of, pretend
from support.mistakes import MEND_MESH, SmallModel, refused
from torch_tp2d import (
    Attention2D,
    Block2DParallel,
    Colwise2D,
    Lifted,
    Norm2D,
    Rowwise2D,
    cross_entropy,
    parallelize_module,
)

# When the model runs.


def test_a_matrix_that_no_entry_names() -> None:
    """Refused every time: the check took itself off before it looked, and a second try ran."""

    def make() -> Callable[[], Any]:
        mesh, model = mesh_of(2, 2), SmallModel()
        parallelize_module(model, mesh, {"embed": Rowwise2D(), "norm": SequenceParallel()})
        ids = torch.zeros(2, 4, dtype=torch.long)

        def act() -> None:
            with pytest.raises(ValueError):
                model(ids)
            model(ids)

        return act

    words = ("SmallModel", "tp_row=2, tp_col=2", "(12, 12)", "torch_tp2d.Replicate()", "freeze it")
    refused((2, 2), ValueError, words, make)


def test_a_copy_is_checked_apart_from_its_original() -> None:
    """Running the copy took the check off the original."""

    def make() -> Callable[[], Any]:
        mesh, model = mesh_of(2, 2), SmallModel()
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
        model = SmallModel()
        model.layers.requires_grad_(False)
        plan = {"embed": Rowwise2D(), "head": Colwise2D(output_layouts=Shard(1))}
        parallelize_module(model, mesh_of(2, 2), plan)
        model(torch.zeros(2, 4, dtype=torch.long))


def test_a_frozen_matrix_that_was_left_out_may_not_be_unfrozen() -> None:
    """It was looked for in the first forward alone, and then learned of each rank's own tokens."""

    def make() -> Callable[[], Any]:
        model = SmallModel()
        model.layers.requires_grad_(False)
        plan = {"embed": Rowwise2D(), "head": Colwise2D(output_layouts=Shard(1))}
        parallelize_module(model, mesh_of(2, 2), plan)
        ids = torch.zeros(2, 4, dtype=torch.long)
        model(ids)
        model.layers.requires_grad_(True)
        with torch.no_grad():
            model(ids)
        return lambda: model(ids)

    refused((2, 2), ValueError, ("no plan entry names", "layers.0.", "torch_tp2d.Replicate"), make)


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


@pytest.mark.parametrize(
    ("style", "layouts", "features", "has"),
    [
        (Rowwise2D, None, 6, 3),
        (Colwise2D, None, 3, 6),
        (Colwise2D, (Shard(0), Shard(-1)), 6, 3),
        (Norm2D, None, 6, 3),
    ],
)
def test_other_features_than_a_rank_has(style: Any, layouts: Any, features: int, has: int) -> None:
    """A product of torch raised, without the module, its layout or the mend."""

    def make() -> Callable[[], Any]:
        mesh = mesh_of(2, 2)
        module = nn.LayerNorm(6) if style is Norm2D else nn.Linear(6, 8)
        parallelize_module(module, mesh, style(input_layouts=layouts) if layouts else style())
        return lambda: module(torch.ones(2, 5, features))

    words = (f"(2, 5, {features})", f"{has} of 6 features", "tp_row=2, tp_col=2", "input_layouts")
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


@pytest.mark.parametrize(
    "style",
    [
        lambda: Colwise2D(row_dim=1),
        lambda: Rowwise2D(row_dim=1),
        lambda: Norm2D(row_dim=1),
        lambda: Colwise2D(row_dim=1, dataflow="weight_stationary"),
    ],
)
def test_rows_that_split_a_sequence_where_there_is_none(style: Callable[[], Any]) -> None:
    """``[tokens, features]`` with ``row_dim=1``: the features were taken for the sequence.

    Gradients were the rows' number times too large, in silence, DTensors malformed, or ranks met in
    different collectives.
    """

    def make() -> Callable[[], Any]:
        mesh = mesh_of(2, 1)
        module = nn.LayerNorm(8) if isinstance(style(), Norm2D) else nn.Linear(8, 12)
        parallelize_module(module, mesh, style())
        return lambda: module(torch.ones(4, 8))

    refused((2, 1), ValueError, ("(4, 8)", "[batch, sequence, features]", "row_dim=0"), make)


class _NanoAttention(nn.Module):
    """As in nanoGPT: its sizes are those of the whole."""

    def __init__(self, by_input: bool) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(16, 48), nn.Linear(16, 16)
        self.n_head, self.n_embd, self.by_input = 4, 16, by_input

    def forward(self, x: Tensor) -> Tensor:
        size, length, width = x.size()
        if self.by_input:
            q, k, v = self.c_attn(x).chunk(3, dim=2)
        else:
            q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        heads = [
            y.view(size, length, self.n_head, width // self.n_head).transpose(1, 2)
            for y in (q, k, v)
        ]
        y = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(size, length, width))


@pytest.mark.parametrize("by_input", [True, False])
def test_attention_that_takes_sizes_of_the_whole(by_input: bool) -> None:
    """All that was said was Python's "not enough values to unpack", or torch's "invalid shape"."""

    plan = {
        "0": Rowwise2D(),
        "1": Attention2D(),
        "1.c_attn": Colwise2D(parts=3),
        "1.c_proj": Rowwise2D(),
    }
    said = "is invalid for input" if by_input else "not enough values to unpack"
    words = rf"tp_col=2.*test_errors_running.py:[0-9]+: .*{said}.*n_head=2.*local_attributes"
    with pretend(0, 4):
        model = nn.Sequential(nn.Embedding(9, 16), _NanoAttention(by_input))
        parallelize_module(model, mesh_of(2, 2), plan)
        with pytest.raises(ValueError, match=words):
            model(torch.zeros(4, 6, dtype=torch.long))
