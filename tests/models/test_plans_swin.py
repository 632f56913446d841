"""Hugging Face's Swin and the tutorial's Swin-UNet on a grid, beside one device in fp64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

import torch_tp2d
from support import world
from support.device import DEVICE
from support.hf import Batch, on_grid, train_beside
from support.marks import deep
from support.models import grid_mesh, relative
from torch_tp2d import Colwise2D, Local2D, Rowwise2D
from torch_tp2d.mesh.grid import Grid
from torch_tp2d.plans import plan_for

TOLERANCE = 1e-11
GRIDS = [deep(2, 2), deep(1, 4), deep(4, 1), deep(2, 4)]
Heads = tuple[int, ...]


def swin(heads: Heads = (4, 8), classes: int = 0, **config: Any) -> nn.Module:
    """Two stages of two blocks, the second of each shifted; neither windows nor merging fit."""
    from transformers import SwinConfig, SwinForImageClassification, SwinModel

    torch.manual_seed(0)
    config = {"image_size": 18, "embed_dim": 24, "drop_path_rate": 0.0, **config}
    made = SwinConfig(
        patch_size=2,
        depths=(2, 2),
        window_size=4,
        mlp_ratio=2.0,
        num_heads=heads,
        initializer_range=0.3,
        num_labels=classes,
        **config,
    )
    model = (SwinForImageClassification if classes else SwinModel)(made).double()
    for name, param in model.named_parameters():
        if name.endswith(("bias", "table", "position_embeddings")):
            # transformers starts them at zero, where a wrong share of them does not show, and
            # AdamW blows up the rounding of keys' biases, whose gradient is zero.
            nn.init.normal_(param, std=0.5)
    return model


def images(size: int, side: int = 18, channels: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(size)
    return torch.randn(size, channels, side, side, generator=generator).double()


def _whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def feature_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Of all features and of the pooled ones, each image's with a weight of its own."""
    out = model(**batch)
    weight = 1 + torch.arange(batch["pixel_values"].shape[0], dtype=torch.float64)
    tokens, pooled = _whole(out.last_hidden_state), _whole(out.pooler_output)
    return (tokens.pow(2).mean((1, 2)) * weight).mean() + (pooled.sin().mean(1) * weight).mean()


def _features(rows: int, columns: int, sizes: list[int], config: dict[str, Any]) -> float:
    reference, model, _ = on_grid(lambda: swin(**config), rows, columns)
    worst = 0.0
    for size in sizes:
        batch = {"pixel_values": images(size)}
        seen = train_beside(
            reference,
            model,
            lambda _, batch=batch: batch,
            truth=feature_loss,
            loss=feature_loss,
            steps=1,
        )
        worst = max(worst, seen.worst)
    return worst


@pytest.mark.parametrize("rows,columns", GRIDS)
def test_swin(rows: int, columns: int) -> None:
    """Shifted windows that need padding, patch merging of an odd map, biases by heads.

    A batch of 3 leaves the last of 4 rows without an image, and gives 2 rows different numbers of
    windows, which no even cut of all windows would.
    """
    assert max(world.run(rows * columns, _features, rows, columns, [4, 3], {})) < TOLERANCE


@pytest.mark.parametrize("heads", [deep((3, 6)), deep((1, 8))])
def test_heads_that_do_not_divide(heads: Heads) -> None:
    """Swin-T has 3 heads in its first stage: whole on every rank there, cut in the others."""
    config = {"heads": heads, "use_absolute_embeddings": True, "qkv_bias": False}
    assert max(world.run(4, _features, 2, 2, [3], config)) < TOLERANCE
    assert max(world.run(4, _features, 1, 4, [2], config)) < TOLERANCE


def _classifier(rows: int, columns: int, classes: int) -> float:
    reference, model, _ = on_grid(lambda: swin(classes=classes), rows, columns)
    batch = {"pixel_values": images(3), "labels": torch.tensor([1, 4, 0])}

    def truth(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch["pixel_values"]).logits, batch["labels"])

    return train_beside(reference, model, lambda _: batch, truth=truth, steps=2).worst


@pytest.mark.deep
def test_swin_for_image_classification() -> None:
    assert max(world.run(4, _classifier, 2, 2, 5)) < TOLERANCE


def _refused(make: Callable[[], nn.Module], options: dict[str, Any]) -> str:
    mesh = grid_mesh(2, 1)
    with pytest.raises(ValueError) as error:
        plan_for(make(), mesh, **options)
    return str(error.value)


def _masked() -> nn.Module:
    from transformers import SwinForMaskedImageModeling

    return SwinForMaskedImageModeling(swin().config)


def _with_mask_token() -> nn.Module:
    from transformers import SwinModel

    return SwinModel(swin().config, use_mask_token=True)


def _refusals() -> list[str]:
    return [
        _refused(swin, {"row_dim": 1}),
        _refused(swin, {"sequence_parallel": True}),
        _refused(_masked, {}),
        _refused(_with_mask_token, {}),
        _refused(lambda: swin(drop_path_rate=0.1), {}),
    ]


def test_what_swin_cannot() -> None:
    for row, sequence, head, token, drawn in world.run(2, _refusals):
        assert "shifted windows" in row and "row_dim=0" in row and "tp_row=2" in row
        assert "leave it out" in sequence
        assert "SwinForMaskedImageModeling" in head and "head of your own" in head
        assert "use_mask_token=False" in token
        assert "drop_path_rate=0.0" in drawn


def _patches(rows: int, columns: int) -> tuple[float, float]:
    """Conv2d alone: the largest difference, and what share of the even one's weight is here."""
    mesh, worst, share = grid_mesh(rows, columns), 0.0, 0.0
    for channels, out, kernel, options in (
        (3, 8, (4, 4), {}),
        (1, 5, (2, 3), {"output_layouts": Replicate()}),
        (6, 3, (1, 1), {"use_local_output": False, "output_layouts": (Shard(0), Replicate())}),
        (2, 8, (2, 2), {"output_layouts": (Replicate(), Replicate())}),
    ):
        torch.manual_seed(0)
        reference = nn.Conv2d(channels, out, kernel, kernel, bias=channels != 2).double()
        model = copy.deepcopy(reference)
        torch_tp2d.parallelize_module(model, mesh, Colwise2D(**options))
        if out == 8 and channels == 3:
            held = model.weight.to_local().numel()
            share = held * mesh.size() / reference.weight.numel()
        x = images(5, side=12, channels=channels).requires_grad_()
        ours = x.detach().clone().requires_grad_()
        wanted, y = reference(x), model(ours)
        layout = model._tp2d.wanted_out
        if not isinstance(y, DTensor):
            # A row without images has one that stands in for them.
            row = Grid(mesh).row
            mine = row.split(len(wanted))[row.index] if layout[0] == Shard(0) else len(wanted)
            y = DTensor.from_local(
                y[:mine],
                mesh,
                layout,
                run_check=False,
                shape=wanted.shape,
                stride=wanted.stride(),
            )
        wanted.sin().sum().backward()
        y.full_tensor().sin().sum().backward()
        worst = max(worst, relative(y.detach(), wanted.detach()), relative(ours.grad, x.grad))
        for name, param in reference.named_parameters():
            worst = max(worst, relative(getattr(model, name).grad, param.grad))
    return worst, share


@pytest.mark.parametrize("rows,columns", [(2, 2), deep(4, 1), deep(1, 4)])
def test_a_patch_embedding(rows: int, columns: int) -> None:
    """Kernels that are not square, features and images that do not divide, the images' gradient."""
    for difference, share in world.run(rows * columns, _patches, rows, columns):
        assert difference < TOLERANCE
        assert share == 1


def _not_patches() -> list[str]:
    mesh, said = grid_mesh(2, 1), []
    for error, style, conv in (
        (TypeError, Colwise2D(), nn.Conv2d(3, 8, 3, padding=1)),
        (TypeError, Colwise2D(), nn.Conv2d(4, 8, 2, 2, groups=2)),
        (TypeError, Rowwise2D(), nn.Conv2d(3, 8, 2, 2)),
        (ValueError, Colwise2D(row_dim=1), nn.Conv2d(3, 8, 2, 2)),
        (ValueError, Colwise2D(algorithm="summa"), nn.Conv2d(3, 8, 2, 2)),
        (ValueError, Colwise2D(dataflow="weight_stationary"), nn.Conv2d(3, 8, 2, 2)),
        (ValueError, Local2D(params={"table": Shard(0)}), nn.Conv2d(3, 8, 2, 2)),
    ):
        with pytest.raises(error) as raised:
            torch_tp2d.parallelize_module(conv, mesh, style)
        said.append(str(raised.value))
    return said


def test_what_is_no_patch_embedding() -> None:
    overlapping, grouped, rowwise, row_dim, algorithm, dataflow, local = world.run(2, _not_patches)[
        0
    ]
    assert "patches do not overlap" in overlapping and "Replicate()" in overlapping
    assert "groups=2" in grouped
    assert "Rowwise2D is for nn.Linear" in rowwise
    assert "row_dim=0" in row_dim
    assert "'summa'" in algorithm and "'weight_stationary'" in dataflow
    assert "no parameter 'table'" in local and "weight" in local


def unet() -> nn.Module:
    from swin_unet import SwinUNet, SwinUNetConfig

    config = SwinUNetConfig(
        image=(16, 16), patch=2, dim=16, depths=(2, 1), heads=(4, 8), window=4, classes=3
    )
    model = SwinUNet(config).double()
    torch.manual_seed(0)
    for name, param in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(param, std=0.5)
    return model


def _scores(model: nn.Module, batch: Batch) -> Tensor:
    scores = model(batch["images"])
    if isinstance(scores, DTensor):
        return torch_tp2d.cross_entropy(scores, batch["labels"])
    return F.cross_entropy(scores.flatten(0, -2), batch["labels"].flatten())


def _pixels(size: int) -> Batch:
    generator = torch.Generator().manual_seed(size)
    labels = torch.randint(0, 3, (size, 16, 16), generator=generator)
    return {"images": images(size, side=16, channels=1), "labels": labels}


def _segment(rows: int, columns: int) -> float:
    from train_swin_unet import plan_2d

    reference = unet()
    model = copy.deepcopy(reference)
    torch_tp2d.parallelize_module(model, grid_mesh(rows, columns), plan_2d())
    worst = 0.0
    for size in (4, 3):
        seen = train_beside(
            reference,
            model,
            lambda _, size=size: _pixels(size),
            truth=_scores,
            loss=_scores,
            steps=1,
        )
        worst = max(worst, seen.worst)
    return worst


@pytest.mark.parametrize("rows,columns", [deep(2, 2), deep(1, 4), deep(4, 1), deep(2, 4)])
def test_swin_unet(rows: int, columns: int) -> None:
    assert max(world.run(rows * columns, _segment, rows, columns)) < TOLERANCE


def _offloaded() -> float:
    from train_swin_unet import plan_2d

    reference = unet()
    model = copy.deepcopy(reference)
    mesh = init_device_mesh(DEVICE, (1, 2, 2), mesh_dim_names=("dp", "tp_row", "tp_col"))
    torch_tp2d.parallelize_module(model, mesh["tp_row", "tp_col"], plan_2d())
    policy = CPUOffloadPolicy(pin_memory=False)
    for part in (*model.encoder, *model.bottom, *model.decoder, model):
        fully_shard(part, mesh=mesh["dp"], offload_policy=policy)
    seen = train_beside(
        reference, model, lambda _: _pixels(4), truth=_scores, loss=_scores, steps=2
    )
    return seen.worst


@pytest.mark.deep
def test_swin_unet_with_cpu_offload() -> None:
    assert max(world.run(4, _offloaded)) < TOLERANCE
