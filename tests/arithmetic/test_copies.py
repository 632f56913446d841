"""Kernels and copies of a Linear off gloo: what its products cost beside multiplying.

Of a Colwise2D and a Rowwise2D whose tokens travel along ``tp_col``, on meta tensors. A copy is what
moves elements and computes nothing: of a shard into what is sent, of what comes into its place.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from expecttest import TestCase
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from support.fake import fake_grid
from torch_tp2d import Colwise2D, Rowwise2D, parallelize_module, token_sizes
from torch_tp2d.runtime.deferred import Deferred

BATCH, SEQUENCE, HIDDEN, INNER = 4, 16, 16, 64

COPIES = {"clone", "copy_", "cat", "constant_pad_nd", "repeat", "zero_", "new_zeros", "zeros"}
PRODUCTS = {"mm", "addmm", "addmm_", "bmm", "baddbmm"}
NOTHING = {"new_empty", "empty", "detach", "_unsafe_view", "equal", "ones_like", "empty_like"}
"""They make no kernel, or are the test's own."""


class Kernels(TorchDispatchMode):
    """How many kernels there are of each kind, and elements that are copied."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()
        self.copied = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, Deferred) for kind in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        name = func._opname
        if func.namespace == "aten" and not func.is_view and name not in NOTHING:
            kind = "copies" if name in COPIES else "products" if name in PRODUCTS else "others"
            self.count[kind] += 1
            if kind == "copies":
                self.copied += sum(x.numel() for x in tree_leaves(out) if isinstance(x, Tensor))
        return out


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, INNER, bias=False)
        self.down = nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x))


def _report(rows: int, columns: int, **options: Any) -> str:
    """A line each for forward and backward, copies in units of a row's tokens of ``HIDDEN``."""
    with fake_grid(rows, columns) as mesh:
        model = Pair().to("meta")
        plan = {
            "up": Colwise2D(input_layouts=Shard(1), **options),
            "down": Rowwise2D(output_layouts=Shard(1), **options),
        }
        parallelize_module(model, mesh, plan)
        token_sizes(mesh, (BATCH, SEQUENCE))
        shape = (BATCH // rows, SEQUENCE // columns, HIDDEN)
        x = torch.zeros(shape, device="meta", requires_grad=True)
        lines = []
        for again in (False, True):
            # Not a leaf, as in a model. The second step is one like all that follow.
            with Kernels() as forward:
                y = model(x * 1)
            with Kernels() as backward:
                y.backward(torch.zeros_like(y))
            if again:
                whole = BATCH // rows * SEQUENCE * HIDDEN
                for name, seen in (("forward", forward), ("backward", backward)):
                    kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(seen.count.items()))
                    lines.append(f"{name:8} {kinds}; {seen.copied / whole:.2f} copied")
    return "\n".join(lines)


class TestCopies(TestCase):
    def test_a_pair_on_1_x_4(self) -> None:
        self.assertExpectedInline(
            _report(1, 4),
            """\
forward  3 copies, 2 others, 6 products; 1.50 copied
backward 3 copies, 6 others, 8 products; 1.50 copied""",
        )

    def test_a_pair_on_2_x_2(self) -> None:
        self.assertExpectedInline(
            _report(2, 2),
            """\
forward  5 copies, 2 others, 4 products; 3.00 copied
backward 6 copies, 6 others, 6 products; 3.50 copied""",
        )

    @pytest.mark.deep
    def test_a_pair_on_4_x_4(self) -> None:
        self.assertExpectedInline(
            _report(4, 4),
            """\
forward  4 copies, 2 others, 6 products; 1.00 copied
backward 5 copies, 6 others, 8 products; 1.25 copied""",
        )
