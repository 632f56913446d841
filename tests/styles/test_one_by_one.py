"""What the functions of torch take together, told by calling them again on other values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from torch_tp2d.parallelize.one_by_one import is_linear, own_dims
from torch_tp2d.parallelize.user_code import Call, local_tensors

Function = Callable[[Tensor], Any]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FEATURES = 2
"""The dim of ``[batch, tokens, features]`` that is split."""

ONE_BY_ONE: dict[str, tuple[Function, int]] = {
    "gelu": (F.gelu, 2),
    "log": (torch.log, 2),
    "sign": (torch.sign, 2),
    "acosh": (torch.acosh, 2),
    "zeros": (lambda x: torch.zeros_like(x), -1),
    "gt": (lambda x: torch.gt(x, 0), 2),
    "prelu": (lambda x: F.prelu(x, x.new_tensor([0.2])), 2),
    "its own weight for each": (lambda x: torch.addcmul(x, x.new_ones(x.shape[-1]), x), 2),
    "repeat_interleave": (lambda x: torch.repeat_interleave(x, 3, 2), 2),
    "nearest": (lambda x: F.interpolate(x, scale_factor=2.0), 2),
    "pad of tokens": (lambda x: F.pad(x, (0, 0, 1, 1)), 2),
    "cumsum of tokens": (lambda x: torch.cumsum(x, 1), 2),
    "mean of tokens": (lambda x: torch.mean(x, 1), 1),
    "outer of features of a token": (lambda x: torch.einsum("bsd->dbs", x), 0),
    "rot90 of samples and tokens": (lambda x: torch.rot90(x, 1, (0, 1)), 2),
    "a token's": (lambda x: torch.index_select(x, 1, _at(x, 3, 0)), 2),
    "their own index": (lambda x: torch.index_select(x, 2, _at(x, *range(x.shape[-1]))), 2),
    "written to": (lambda x: torch.clone(x).clamp_(min=0.5), 2),
}
TOGETHER: dict[str, Function] = {
    "softmax": lambda x: torch.softmax(x, -1),
    "cumsum": lambda x: torch.cumsum(x, -1),
    "flip": lambda x: torch.flip(x, (-1,)),
    "roll": lambda x: torch.roll(x, 1, -1),
    "half a turn": lambda x: torch.fft.fftshift(x, -1),
    "mode": lambda x: torch.mode(x, -1),
    "std_mean": lambda x: torch.std_mean(x, -1),
    "count_nonzero": lambda x: torch.count_nonzero(x, -1),
    "tril": torch.tril,
    "trace": lambda x: torch.linalg.matrix_norm(x),
    "repeat": lambda x: torch.tile(x, (1, 1, 2)),
    "pad": lambda x: F.pad(x, (1, -1)),
    "linear": lambda x: F.interpolate(x, scale_factor=2.0, mode="linear"),
    "gather": lambda x: torch.gather(x, 2, _reversed(x).expand_as(x)),
    "an entry": lambda x: torch.index_select(x, 2, _at(x, 0)),
    "as many entries": lambda x: torch.index_select(x, 2, _reversed(x)),
    "index_fill": lambda x: torch.index_fill(x, 2, _at(x, 0), 0.0),
    "max_pool1d": lambda x: F.max_pool1d(x, 3, 1, 1),
    "histc": lambda x: torch.histc(x, 4),
    "channel_shuffle": lambda x: F.channel_shuffle(x.mT, 2),
    "fft2": torch.fft.fft2,
    "bilinear": lambda x: F.bilinear(x, x, x.new_ones(1, x.shape[-1], x.shape[-1])),
}
LINEAR: dict[str, tuple[Function, bool | None]] = {
    "flip": (lambda x: torch.flip(x, (0,)), True),
    "tril": (torch.tril, True),
    "cumsum": (lambda x: torch.cumsum(x, 1), True),
    "erfc": (torch.erfc, False),
    "relu": (torch.relu, False),
    "abs": (torch.abs, False),
    "square": (torch.square, False),
    "acosh": (torch.acosh, False),
    "add_": (lambda x: x.add_(1), False),
    "isnan": (torch.isnan, None),
    "dropout": (F.dropout, None),
}


def _at(x: Tensor, *at: int) -> Tensor:
    return torch.tensor(at, device=x.device)


def _reversed(x: Tensor) -> Tensor:
    return _at(x, *range(x.shape[-1] - 1, -1, -1))


class _Last(TorchFunctionMode):
    """The last call of a function that makes what is returned."""

    call: Call

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.__name__ not in ("__get__", "expand_as", "clone", "new_ones", "new_tensor"):
            given = local_tensors(args, kwargs)
            self.call = Call(func, func.__name__, args, kwargs or {}, given)
        return out


def _call(f: Function, x: Tensor) -> Call:
    with _Last() as last:
        f(x)
    return last.call


def _x(dtype: torch.dtype, features: int = 6) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(4, 5, features, device=DEVICE).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_entries_that_are_made_of_the_same_alone(dtype: torch.dtype) -> None:
    for features in (2, 5, 6):
        for name, (f, dim) in ONE_BY_ONE.items():
            x = _x(dtype, features)
            call = _call(f, x)
            found = own_dims(call, [(call.given[0], FEATURES)])
            assert found is not None and {*found} == {dim}, (name, features)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_entries_that_are_taken_together(dtype: torch.dtype) -> None:
    """Also by where they stand, and of signs and zeros alone."""
    for name, f in TOGETHER.items():
        for features in (4, 6):
            call = _call(f, _x(dtype, features))
            x = call.given[0]
            dim = 1 if name == "channel_shuffle" else FEATURES
            assert own_dims(call, [(x, dim)]) == [], (name, features)


def test_distances_of_two_that_are_split() -> None:
    """They were given the same values, and had none."""
    x, y = _x(torch.float64), _x(torch.float64) + 1
    call = Call(torch.dist, "dist", (x, y), {}, [x, y])
    assert own_dims(call, [(x, FEATURES), (y, FEATURES)]) == []


def test_what_has_no_elements() -> None:
    """A column without features took its tokens for what no entry changes, so for not split.

    They met those of the other columns as if they were whole, and a right program was refused.
    """
    x = torch.zeros(4, 5, 0, device=DEVICE)
    assert own_dims(Call(F.gelu, "gelu", (x,), {}, [x]), [(x, 1)]) is None


@pytest.mark.parametrize("name", LINEAR)
def test_what_grows_as_a_sum_does(name: str) -> None:
    f, wanted = LINEAR[name]
    x = _x(torch.float64)
    call = _call(f, x)
    assert is_linear(call, [call.given[0]]) is wanted


def test_nothing_is_changed() -> None:
    """Not what a function writes to, nor the random numbers that follow."""
    x, mean = _x(torch.float64), torch.zeros(5, dtype=torch.float64, device=DEVICE)
    calls = [
        Call(torch.Tensor.add_, "add_", (x, 1), {}, [x]),
        Call(F.instance_norm, "instance_norm", (x, mean, mean + 1), {}, [x, mean]),
        Call(F.dropout, "dropout", (x,), {}, [x]),
        Call(torch.bernoulli, "bernoulli", (x, 0.1), {}, [x]),
    ]
    before, device = x.clone(), torch.get_device_module(DEVICE) if DEVICE != "cpu" else torch
    drawn = device.get_rng_state()
    found = [own_dims(call, [(x, FEATURES)]) for call in calls]
    assert found[0] == [FEATURES] and found[2:] == [None, None]
    assert torch.equal(x, before) and not mean.any()
    assert torch.equal(drawn, device.get_rng_state())


@torch.library.custom_op("tp2d_tests::twice", mutates_args=())
def _twice(x: Tensor) -> Tensor:
    _twice_called.append(x)
    return x * 2


_twice_called: list[Tensor] = []


def test_what_is_not_torchs_own_is_not_called_again() -> None:
    """It may send something, which the other ranks would wait for."""
    x = _x(torch.float64)
    call = _call(_twice, x)
    assert len(_twice_called) == 1
    assert own_dims(call, [(x, FEATURES)]) is None and is_linear(call, [x]) is None
    assert len(_twice_called) == 1
