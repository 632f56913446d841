"""A style of torch's own on one device and lifted onto a grid, as torch's tests of it have it."""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from support.marks import deep
from support.models import noise, relative
from support.one_module import collect, feed, gradients, spread
from torch_tp2d.mesh.layouts import Layout

TOLERANCE = 1e-10
GRIDS = [deep(1, 4), (2, 2), deep(4, 1)]
ROW: Layout = Shard(0), Replicate()
BOTH: Layout = Shard(0), Shard(0)
FEATURES: Layout = Shard(0), Shard(-1)


def run_beside(
    reference: nn.Module,
    model: nn.Module,
    mesh: DeviceMesh,
    x: Tensor,
    given: Layout,
    taken: Layout,
    *,
    dtensor: bool = False,
) -> dict[str, float]:
    """Forward, input gradient and parameter gradients, of a local input or of a DTensor."""
    kind = "mesh" if dtensor else "local"
    leaf, ours = x.clone().requires_grad_(), feed(x, mesh, given, kind)
    wanted, y = reference(leaf), model(ours)
    out = "mesh" if isinstance(y, DTensor) else "local"
    found = {"output": relative(collect(y.detach(), mesh, taken, out, wanted.shape), wanted)}
    grad = noise(*wanted.shape, seed=5)
    wanted.backward(grad)
    share = spread(grad, mesh, taken)
    y.backward(share if isinstance(y, DTensor) else share.to_local())
    assert ours.grad is not None and leaf.grad is not None
    found["input's gradient"] = relative(collect(ours.grad, mesh, given, kind, x.shape), leaf.grad)
    return found | gradients(reference, model)
