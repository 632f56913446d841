"""Whether values are the same bit by bit, in the widest integers that their memory divides into."""

from __future__ import annotations

import pytest
import torch

from torch_tp2d.runtime.versions import same_bits, to_compare

DTYPES = [torch.bool, torch.int8, torch.bfloat16, torch.float32, torch.float64, torch.complex128]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(0,), (), (1,), (3,), (4, 6), (5, 7)], ids=str)
def test_any_element_counts(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    a = (torch.randn(shape) * 4).to(dtype)
    assert same_bits(a, a.clone())
    for at in range(a.numel()):
        b = a.clone()
        b.view(-1)[at] = not b.view(-1)[at] if dtype == torch.bool else b.view(-1)[at] + 1
        assert not same_bits(a, b) and not same_bits(b, a)


def test_bits_count_and_not_numbers() -> None:
    nan, zeros = torch.full((4,), torch.nan), torch.zeros(4)
    assert same_bits(nan, nan.clone())
    assert not same_bits(zeros, -zeros)
    assert not same_bits(zeros, zeros.double())


def test_where_in_memory_they_lie_does_not_count() -> None:
    """Half of the views of a float32 tensor begin in the middle of eight bytes."""
    whole = torch.arange(24.0)
    for start in range(3):
        a = whole[start : start + 6]
        assert same_bits(a, a.clone()) and same_bits(a.clone(), a)
        assert not same_bits(a, whole[start + 1 : start + 7])
    columns, strange = whole.view(4, 6)[:, 1:4], whole.as_strided((1,), (5,), 3)
    assert same_bits(columns, columns.clone()) and same_bits(columns.t(), columns.t().clone())
    assert same_bits(strange, torch.tensor([3.0]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(0, 5), (), (3,), (4, 6), (5, 7)], ids=str)
@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize("transposed", [False, True])
def test_what_is_compared_follows_every_element(
    dtype: torch.dtype, shape: tuple[int, ...], start: int, transposed: bool
) -> None:
    torch.manual_seed(0)
    count = torch.Size(shape).numel()
    x = torch.randn(count + start).to(dtype)[start:].view(shape)
    x = x.t() if transposed and x.ndim == 2 else x
    found = to_compare(x)
    assert found is not None
    for at in range(count):
        flat = x.t() if transposed and x.ndim == 2 else x
        value = flat.reshape(-1)[at].clone()
        for other in (value + 1, -value, torch.nan):
            flat.view(-1)[at] = other
            assert not torch.equal(*found)
        flat.view(-1)[at] = value
        assert torch.equal(*found)


def test_a_nan_that_stays_has_not_changed() -> None:
    found = to_compare(torch.full((3, 2), torch.nan))
    assert found is not None and torch.equal(*found)
    zeros = torch.zeros(3)
    found = to_compare(zeros)
    zeros.neg_()
    assert found is not None and not torch.equal(*found)
