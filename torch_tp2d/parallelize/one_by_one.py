"""Tells what one of torch's functions makes of a part of a dim: by calling it on other values.

So no list decides: a function that was never heard of takes the entries of a dim one by one, or
several together, and what it makes of the terms of a sum adds up to what it makes of the sum, or
does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, WrapperDescriptorType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from .._torch_compat.tensors import disable_current_modes
from .user_code import Call, is_local, namespace_of

__all__ = ["is_linear", "own_dims"]

_TORCHS = FunctionType, BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType
_CANNOT = IndexError, NotImplementedError, RuntimeError, TypeError, ValueError
"""What functions raise that cannot take other values."""

Again = Callable[[Mapping[int, Tensor]], list[Tensor]]


def own_dims(call: Call, parts: Sequence[tuple[Tensor, int]]) -> list[int] | None:
    """For each tensor that is made, the dim whose entries are each made of those of a part alone.

    Args:
        parts: tensors given, and the dim that is split of each.

    Returns:
        -1 for what no entry of a part changes; nothing at all if entries of a part were taken
        together, or by where they stand; None if that cannot be told.
    """
    size = parts[0][0].shape[parts[0][1]]
    sizes = {x.shape[dim] for x, dim in parts}
    among = {id(x) for x, _ in parts}
    others = [x for x in _tensors(call.args, call.kwargs) if id(x) not in among]
    if size < 2 or any(one % size for one in sizes) or not all(x.numel() for x, _ in parts):
        return None
    # What another tensor has for each entry tells them apart by right.
    by_place = not any(size in x.shape for x in others)
    with _again(call) as again:
        if again is None:
            return None
        found = _own_dims(again, parts, size, by_place, _between_0_and_1)
        # Signs and zeros, where that has changed nothing.
        signed = set(found) == {-1}
        return _own_dims(again, parts, size, by_place, _of_few) if signed else found
    return None


def _own_dims(
    again: Again,
    parts: Sequence[tuple[Tensor, int]],
    size: int,
    by_place: bool,
    values: Callable[[Tensor, int], Tensor],
) -> list[int]:
    first = size // 2
    pairs = [(x, dim, *_two(x, dim, 2 * at, values)) for at, (x, dim) in enumerate(parts)]

    def made(front: int, back: int, *, swapped: bool = False) -> list[Tensor]:
        """Of parts whose first half has values of one of the two, and whose second."""
        given = {}
        for x, dim, *two in pairs:
            at = first * (x.shape[dim] // size)
            halves = [
                two[front].narrow(dim, 0, at),
                two[back].narrow(dim, at, x.shape[dim] - at),
            ]
            given[id(x)] = torch.cat(halves[::-1] if swapped else halves, dim)
        return again(given)

    ys = made(0, 0)
    unchanged = [True] * len(ys)
    own = [[d for d in range(y.ndim) if _cut(y, d, first, size)] for y in ys]
    # One by one, since what is made may be large.
    for front, back, swapped in ((0, 1, False), (1, 0, False), (0, 0, True))[: 2 + by_place]:
        for number, (y, z) in enumerate(zip(ys, made(front, back, swapped=swapped), strict=True)):
            unchanged[number] &= swapped or _same(y, z)
            own[number] = [
                dim
                for dim in own[number]
                if y.shape == z.shape
                and _is_own(y, z, dim, _cut(y, dim, first, size), front, back, swapped)
            ]
    if not all(dims or as_it_was for dims, as_it_was in zip(own, unchanged, strict=True)):
        return []
    return [-1 if as_it_was else dims[0] for dims, as_it_was in zip(own, unchanged, strict=True)]


def _cut(y: Tensor, dim: int, first: int, size: int) -> int:
    """Where a dim is cut as the parts are, 0 if it cannot be."""
    at, left = divmod(y.shape[dim] * first, size)
    return 0 if left else at


def _is_own(y: Tensor, z: Tensor, dim: int, at: int, front: int, back: int, swapped: bool) -> bool:
    """Whether the halves of a dim are as they were where those of the parts are."""
    end = y.shape[dim]
    first, second = y.narrow(dim, 0, at), y.narrow(dim, at, end - at)
    if swapped:
        return _same(second, z.narrow(dim, 0, end - at)) and _same(
            first, z.narrow(dim, end - at, at)
        )
    return (front != 0 or _same(first, z.narrow(dim, 0, at))) and (
        back != 0 or _same(second, z.narrow(dim, at, end - at))
    )


def is_linear(call: Call, sums: Sequence[Tensor]) -> bool | None:
    """Whether what is made of other values of these tensors grows as they do.

    Returns:
        None if that cannot be told, and for what only asks (``isnan``).
    """
    with _again(call) as again:
        if again is None or not all(x.is_floating_point() for x in sums):
            return None
        values = {id(x): _between_0_and_1(x, at) for at, x in enumerate(sums)}
        less = {key: one * -0.5 for key, one in values.items()}
        made = list(zip(again(values), again(less), strict=True))
        if all(y.dtype == torch.bool for y, _ in made):
            return None
        return all(_same(y * -0.5, z) and not _has_nan(y) for y, z in made)
    return None


@contextmanager
def _again(call: Call) -> Iterator[Again | None]:
    """A way to call a function of torch's own on other tensors, which changes nothing; or None."""
    func, args, kwargs = call.func, call.args, call.kwargs
    known = _tensors(args, kwargs)
    is_torchs = isinstance(func, _TORCHS) and getattr(func, "__module__", "torch")[:5] == "torch"
    is_torchs = is_torchs or namespace_of(func) == "aten"
    if not is_torchs or not all(type(x) in (Tensor, Parameter) and not x.is_meta for x in known):
        yield None
        return

    def again(values: Mapping[int, Tensor]) -> list[Tensor]:
        # Copies, since a function may write to what it is given.
        given = {id(x): values[id(x)] if id(x) in values else x.detach().clone() for x in known}
        out = func(
            *(_with(one, given) for one in args),
            **{key: _with(one, given) for key, one in kwargs.items()},
        )
        if not torch.equal(drawn, _drawn(known[0].device)):
            raise RuntimeError("random numbers")
        return [y for y in (out if isinstance(out, tuple | list) else [out]) if is_local(y)]

    drawn = _drawn(known[0].device)
    with torch.no_grad(), disable_current_modes():
        try:
            yield again
        except _CANNOT:
            pass
        finally:
            _draw_again(known[0].device, drawn)


def _tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for one in (*args, *kwargs.values()):
        if isinstance(one, tuple | list):
            found += _tensors(one, {})
        elif isinstance(one, Tensor):
            found.append(one)
    return found


def _with(one: Any, given: Mapping[int, Tensor]) -> Any:
    if type(one) in (tuple, list):
        return type(one)(_with(x, given) for x in one)
    return given[id(one)] if isinstance(one, Tensor) else one


def _two(
    x: Tensor, dim: int, seed: int, values: Callable[[Tensor, int], Tensor]
) -> tuple[Tensor, Tensor]:
    """Two tensors like this, which differ in all or most entries."""
    if x.is_floating_point():
        return values(x, seed), values(x, seed + 1)
    # Indices may not be larger than another tensor has entries.
    return x.detach(), x.detach().roll(1, dim)


def _between_0_and_1(x: Tensor, seed: int) -> Tensor:
    """Values of which a logarithm, a root and an arc cosine can be taken."""
    generator = torch.Generator(x.device).manual_seed(seed)
    values = torch.rand(x.shape, generator=generator, device=x.device, dtype=torch.float32)
    return (values * 0.8 + 0.1).to(x.dtype)


def _of_few(x: Tensor, seed: int) -> Tensor:
    return (_between_0_and_1(x, seed) * 3).floor() - 1


def _same(x: Tensor, y: Tensor) -> bool:
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    if not (x.is_floating_point() or x.is_complex()):
        return torch.equal(x, y)
    if x.is_complex():
        x, y = torch.view_as_real(x), torch.view_as_real(y)
    eps = torch.finfo(x.dtype).eps
    largest = x.nan_to_num(0, 0, 0).abs().max() if x.numel() else 0
    return torch.allclose(x, y, rtol=0, atol=float(largest) * 8 * eps, equal_nan=True)


def _has_nan(x: Tensor) -> bool:
    return bool(x.isnan().any())


def _drawn(device: torch.device) -> Tensor:
    """The state of the device's random numbers."""
    state: Tensor = _random_numbers(device).get_rng_state()
    return state


def _draw_again(device: torch.device, state: Tensor) -> None:
    _random_numbers(device).set_rng_state(state)


def _random_numbers(device: torch.device) -> Any:
    return torch if device.type == "cpu" else torch.get_device_module(device)
