"""What a mistake is met with: an error on every rank, before anything is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from support.fake import pretend

MEND_MESH = ('init_device_mesh(device, (R, C), mesh_dim_names=("tp_row", "tp_col"))',)


class Heads(nn.Module):
    """Projects into 3 heads of 4, or into 2 for keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim = 4
        self.wq, self.wk, self.wo = nn.Linear(12, 12), nn.Linear(12, 8), nn.Linear(12, 12)


class SmallModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 12)
        self.layers = nn.ModuleList([Heads(), Heads()])
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, 10, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.embed(x)))


class Silence(TorchDispatchMode):
    """Fails if anything is sent."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            raise AssertionError(f"{func} ran before the mistake was found")
        return func(*args, **(kwargs or {}))


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
            with pytest.raises(kind) as caught, Silence():
                act()
        message = str(caught.value)
        missing = [word for word in words if word not in message]
        assert type(caught.value) is kind
        assert not missing, f"rank {rank}: {missing} is not in: {message}"
