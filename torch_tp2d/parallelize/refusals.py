"""What is said of the user's code where it takes a rank's part of a dim for all of it."""

from __future__ import annotations

from torch import Tensor

from ..comm.axis import Axis
from .moved_dims import Of

__all__ = [
    "adds_up",
    "all_of_it",
    "beside_a_slice",
    "holds_several",
    "in_parts",
    "not_of_all",
    "some_of_it",
]

_A_DTENSOR = (
    "a DTensor (use_local_output=False), or write this as a module under torch_tp2d.Replicate(), "
    "which computes on DTensors"
)


def not_of_all(place: str, name: str, x: Tensor, dim: int, of: Of, axis: Axis) -> str:
    """Entries are taken together, or by where they stand."""
    kind = of if of in ("samples", "tokens") else "features or heads"
    return (
        f"in {place} {name} takes dim {dim} of a tensor of shape {tuple(x.shape)} for all {kind}, "
        f"but each rank has a part of them along {axis.name}. Write it as a module under "
        f"torch_tp2d.Replicate() with input_layouts=(Shard(0), Shard(-1)), which sees all of "
        f"them, let the module before it hand on DTensors (use_local_output=False), or go on "
        f"from a sum over the ranks"
    )


def adds_up(place: str, name: str, x: Tensor, dim: int, of: Of, axis: Axis) -> str:
    """A sum goes on that is a term of the sum over the ranks."""
    whole = "" if of == "samples" else "all of it (output_layouts=Replicate()) or "
    return (
        f"in {place} {name} adds up dim {dim} of a tensor of shape {tuple(x.shape)}, but each rank "
        f"has a part of it along {axis.name}, and goes on with its own sum as if it were that of "
        f"all. Let the module before it hand on {whole}{_A_DTENSOR}, or sum over the ranks first"
    )


def all_of_it(place: str, name: str, x: Tensor, dim: int, axis: Axis) -> str:
    """One number that is made of a part goes on, a mean or a norm."""
    return (
        f"in {place} {name} takes all of dim {dim} of a tensor of shape {tuple(x.shape)}, but each "
        f"rank has a part of it along {axis.name}, and goes on with what it has made of that. Let "
        f"the module before it hand on a DTensor (use_local_output=False), of which it is that of "
        f"all, and go on with its full_tensor(); or write this as a module under "
        f"torch_tp2d.Replicate(), which computes on DTensors. What is only looked at is to be made "
        f"in torch.no_grad()"
    )


def some_of_it(place: str, name: str, x: Tensor, dim: int, axis: Axis) -> str:
    """Some features are taken, which would be some of each rank's."""
    return (
        f"in {place} {name} takes some entries of dim {dim} of a tensor of shape "
        f"{tuple(x.shape)}, but each rank has a part of them along {axis.name}, and would take "
        f"others. If the module before it holds several projections side by side, say so by its "
        f"parts=; else let it hand on all of them (output_layouts=Replicate()), or a DTensor "
        f"(use_local_output=False)"
    )


def beside_a_slice(place: str, name: str, axis: Axis) -> str:
    """Samples of a slice meet others, which would be others of each rank's."""
    return (
        f"in {place} {name} takes samples of a slice together with others, but each rank has a "
        f"part of them along {axis.name}, and would take others. Let the module before it hand on "
        f"{_A_DTENSOR}"
    )


def holds_several(dim: int) -> str:
    """Features of several modules lie side by side in what a module takes for those of one."""
    return (
        f", whose dim {dim} holds a part of each of several projections or tokens, side by side: "
        f"take them apart first (x.chunk(n, -1)), or let the modules before it hand on all "
        f"features (output_layouts=Replicate()) or DTensors (use_local_output=False)"
    )


def in_parts(what: str, x: Tensor, dim: int) -> str:
    """Something is made for a rank's part of a dim of ``x``."""
    return f"{what} of shape {tuple(x.shape)} of whose dim {dim} each rank has a part"
