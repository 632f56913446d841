"""What the kernels of a GPU are given, and what is made of what they give, without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from support.record import Recorder
from torch_tp2d.ops.attention import block, kernels
from torch_tp2d.ops.attention.block import attend, attend_backward
from torch_tp2d.ops.dropout import draw_key


class _Operators(TorchDispatchMode):
    """The names of what is called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func._opname)
        return func(*args, **(kwargs or {}))


FLASH, EFFICIENT = "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"


@pytest.mark.parametrize(
    "flash,dtype,masked,wanted",
    [
        (True, torch.bfloat16, False, FLASH),
        (True, torch.bfloat16, True, EFFICIENT),
        (False, torch.bfloat16, False, EFFICIENT),
        (False, torch.float32, True, EFFICIENT),
    ],
)
def test_the_kernel_of_a_gpu(
    flash: bool, dtype: torch.dtype, masked: bool, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block of ring attention takes CUDA's that torch allows, whose shapes and devices fit."""
    monkeypatch.setattr(kernels, "can_use_flash_attention", lambda params: flash)
    monkeypatch.setattr(kernels, "can_use_efficient_attention", lambda params: True)
    with FakeTensorMode(), torch.no_grad():
        for keys, causal in ((90, False), (120, True)):
            query, key, value = (
                torch.empty(2, 8, length, 64, dtype=dtype, device="cuda")
                for length in (120, keys, keys)
            )
            mask = torch.ones(1, 1, 1, keys, dtype=torch.bool, device="cuda") if masked else None
            with Recorder("cuda") as recorder, _Operators() as called:
                out, log = attend(query, key, value, mask, causal, 0.1, False)
                grads = attend_backward(
                    *(out, query, key, value, mask, out, log, causal, 0.1, False, False)
                )
            assert {wanted, f"{wanted}_backward"} <= called.names
            assert log.shape == query.shape[:-1] and log.is_cuda
            for like, made in zip((query, query, key, value), (out, *grads[:3]), strict=True):
                assert made.shape == like.shape and made.is_cuda and made.dtype == like.dtype
            assert not recorder.record.faults


def test_a_captured_graph_would_drop_the_same_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="a captured CUDA graph would drop the same"):
        draw_key()


def test_what_the_efficient_kernel_is_given_and_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """By another that is as particular: rows of 16 bytes, padded masks, padded logarithms.

    A mask of all heads went to it as it was, which CUDA's kernel refuses. An output that lay head
    after head gave gradients of half precision that were wrong, or nan, on a GPU: the kernel reads
    it as if the heads of a query were side by side.
    """
    forward, backward = kernels.flash_attention_for_cpu, kernels.flash_attention_for_cpu_backward

    def check(*tensors: torch.Tensor) -> None:
        for x in tensors:
            assert x.stride(-1) == 1 and not any(n * 8 % 16 for n in x.stride()[:-1])

    def efficient(q: Any, k: Any, v: Any, bias: Any, logs: bool, *rest: Any, **scale: Any) -> Any:
        check(q, k, v)
        assert logs and bias.stride(-2) % 16 == 0
        assert bias.shape == (*q.shape[:-1], k.shape[-2])
        out, log = forward(q, k, v, *rest, attn_mask=bias, **scale)
        nothing = (bias == -torch.inf).all(-1)
        out = out.masked_fill(nothing[..., None], torch.nan)
        return out, F.pad(log, (0, -log.shape[-1] % 32), value=torch.inf), None, None

    def efficient_backward(*given: Any, **scale: Any) -> Any:
        grad, q, k, v, bias, out, log, _, _, rate, wanted, causal = given
        check(grad, q, k, v, out)
        assert out.transpose(1, 2).is_contiguous()
        assert log.shape[-1] % 32 == 0 and log[..., q.shape[-2] :].eq(torch.inf).all()
        assert wanted == [True, True, True, False] and bias.stride(-2) % 16 == 0
        assert bias.shape == (*q.shape[:-1], k.shape[-2])
        log = log[..., : q.shape[-2]].contiguous()
        return *backward(grad, q, k, v, out, log, rate, causal, attn_mask=bias, **scale), None

    monkeypatch.setattr(kernels, "efficient_attention", efficient)
    monkeypatch.setattr(kernels, "efficient_attention_backward", efficient_backward)
    monkeypatch.setattr(block, "kernel_for", lambda *given: kernels.EFFICIENT)
    torch.manual_seed(0)
    query = torch.randn(2, 3, 7, 4, dtype=torch.float64)
    held = torch.randn(2, 3, 5, 9, dtype=torch.float64)
    # Rows of an odd number of elements, which begin anywhere.
    key, value = held[..., :4], held[..., 5:]
    mask = torch.rand(2, 1, 7, 5) > 0.3
    mask[0, 0, 2] = False
    grad = torch.randn_like(query)
    given = query, key, value, mask
    out, log = attend(*given, False, 0.3, False)
    wanted_out, wanted_log = attend(*given, False, 0.3, True)
    torch.testing.assert_close(out, wanted_out, atol=1e-12, rtol=0)
    torch.testing.assert_close(log, wanted_log, atol=1e-12, rtol=0)
    rest = out, log, False, 0.3
    grads = attend_backward(grad, *given, *rest, False, False)
    wanted = attend_backward(grad, *given, *rest, True, False)
    for found, expected in zip(grads[:3], wanted[:3], strict=True):
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
