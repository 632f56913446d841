"""What only a GPU can tell: its kernels beside fp64, and steps in which the host never waits.

Skipped where there is none. What several ranks do on one is in the other tests, run with
``TP2D_TEST_DEVICE=cuda`` (``support/device.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from support.record import as_rank
from support.steps import PLANS
from torch_tp2d.ops import dropout
from torch_tp2d.ops.attention import kernels
from torch_tp2d.ops.attention.block import attend, attend_backward, merge

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

# Rounding of the inputs, and of products in the tensor cores; sums are in fp32.
ROUNDING = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def _random(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).cuda()


def _differ(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("masked", [None, "bool", "added", "of all heads"])
@pytest.mark.parametrize("dtype", ROUNDING)
def test_attention_to_blocks_of_keys(dtype: torch.dtype, masked: str | None) -> None:
    """Two blocks of keys, merged, and their gradients: flash or the memory-efficient kernel."""
    chosen = set()
    for features in (64, 40, 12, 7):
        query, grad = (_random(2, 3, 37, features, seed=seed).to(dtype).double() for seed in (0, 1))
        key, value = (_random(2, 3, 58, features, seed=seed).to(dtype).double() for seed in (2, 3))
        mask = None
        if masked is not None:
            seen = _random(2, 1 if masked == "of all heads" else 3, 37, 58, seed=4) > -0.5
            seen[0, 0, 5], seen[0, 0, 6, :37] = False, False
            added = torch.where(seen, _random(*seen.shape, seed=5), -torch.inf)
            mask = seen if masked == "bool" else added
        cuts = slice(0, 37), slice(37, 58)

        def blocks(
            kind: torch.dtype,
            exact: bool,
            of: tuple[Tensor, ...] = (query, key, value, grad),
            mask: Tensor | None = mask,
            cuts: tuple[slice, ...] = cuts,
        ) -> list[Tensor]:
            query, key, value, grad = (x.to(kind) for x in of)
            if mask is not None and mask.is_floating_point():
                mask = mask.to(kind)
            parts = [
                (key[:, :, cut], value[:, :, cut], None if mask is None else mask[..., cut])
                for cut in cuts
            ]
            # The first block is causal, as the one of a row's own tokens is.
            causal = [mask is None, False]
            if not exact:
                first = kernels.kernel_for(query, *parts[0][:2], mask is not None)
                chosen.add(type(first).__name__)
            scale = 0.3
            out, log = attend(query, *parts[0], causal[0], scale, exact)
            out, log = out.to(torch.float64), log.to(torch.float64)
            more, more_log = attend(query, *parts[1], causal[1], scale, exact)
            merge(out, log, more.to(torch.float64), more_log.to(torch.float64))
            found = [out]
            wide = torch.float64 if exact else torch.float32
            for part, by in zip(parts, causal, strict=True):
                grads = attend_backward(
                    *(grad, query, *part, out.to(kind), log.to(wide), by, scale, exact, False)
                )
                found += [x.double() for x in grads[:3] if x is not None]
            return found

        wanted = blocks(torch.float64, True)
        for found, exact in zip(blocks(dtype, False), wanted, strict=True):
            assert _differ(found, exact) < 2 * ROUNDING[dtype], (features, chosen)
    flash = masked is None and dtype != torch.float32
    assert ("_Flash" in chosen) == flash and chosen - {"_Flash"} <= {"_Efficient", "NoneType"}


@pytest.mark.parametrize("dtype", ROUNDING)
def test_dropout_by_compiled_kernels(dtype: torch.dtype) -> None:
    """The same elements as on a CPU, for sizes and rates that were not compiled for."""
    for step, (shape, rate) in enumerate([((3, 5, 16), 0.1), ((2, 9, 40), 0.5), ((7, 33), 0.3)]):
        key = dropout.draw_key()
        index = [torch.arange(n) + 3 for n in shape]
        x = _random(*shape, seed=step).to(dtype).requires_grad_()
        out = dropout.dropout(x, key, rate, [one.cuda() for one in index])
        mask = dropout.dropped(key, rate, index).cuda()
        torch.testing.assert_close(out, dropout.drop(x, mask, rate), rtol=ROUNDING[dtype], atol=0)
        assert out.dtype == dtype and torch.equal(out == 0, mask)
        (grad,) = torch.autograd.grad(out.sum(), x)
        assert torch.equal(grad == 0, mask)
    assert dropout.draw_key().device.type == "cpu"


@contextmanager
def _no_waiting() -> Iterator[None]:
    """Whatever has the host wait for the GPU is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", ["llama", "gpt2 odd", "bert"])
def test_the_host_never_waits_for_the_device(name: str) -> None:
    """In a step after the first ones, which agree on sizes; transfers are left out."""
    with as_rank(3, 2, 2, device="cuda") as mesh:
        step = PLANS[name](mesh, "cuda")
        for _ in range(3):
            step().backward()
        with _no_waiting():
            step().backward()
        torch.cuda.synchronize()
