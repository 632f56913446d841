"""Warns where the user's code goes on with a rank's part in a way that cannot be followed.

Numbers of Python, operators that are not torch's own, functions inside ``torch.vmap``: whether
what they make of a part is right, their author knows.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping

from torch import Tensor

from .._torch_compat.tensors import vmapped
from ..comm.axis import Axis
from .moved_dims import Part
from .user_code import Call, namespace_of, place_of

__all__ = ["leaves_torch", "loses_a_part"]

_TO_PYTHON = ("item", "tolist", "numpy", "__float__", "__int__", "__index__", "__complex__")
_OF_TORCH = ("aten", "prim", "c10d", "symm_mem", "quantized", "mkldnn", "torch")
"""How namespaces begin of torch's own operators, and of transfers, which know of other ranks."""


def leaves_torch(call: Call, said: str) -> bool:
    """Whether a call gives Python what torch does not see any more.

    Args:
        said: where it was made, if it is a rank's own number, of which is warned.
    """
    if call.name not in _TO_PYTHON:
        return False
    if said and (place := place_of()) is not None:
        warnings.warn(
            f"in {place} {call.name} gives Python what each rank has made of its own part, which "
            f"is right to look at, in torch.no_grad(), and wrong to compute with. Of that part: "
            f"{said}",
            stacklevel=2,
        )
    return True


def loses_a_part(
    call: Call, split_dims: Callable[[Tensor], Mapping[int, Part]], axis_of: Callable[[Part], Axis]
) -> bool:
    """Whether nothing of a call can be followed; warns of features that it is given."""
    batched = [whole for x in call.given if (whole := vmapped(x)) is not None]
    namespace = namespace_of(call.func).lstrip("_")
    if not batched and (not namespace or namespace.startswith(_OF_TORCH)):
        return False
    what = f"{call.name}, inside torch.vmap," if batched else f"{call.name}, not torch's own,"
    for x in batched or call.given:
        part = split_dims(x).get(x.ndim - 1)
        if part is None or part.of == "several" or (place := place_of()) is None:
            continue
        warnings.warn(
            f"in {place} {what} is given a tensor of shape {tuple(x.shape)}, of whose dim "
            f"{x.ndim - 1} each rank has a part along {axis_of(part).name}: whether it takes the "
            f"entries of that dim one by one, which is right, or together, cannot be told. If "
            f"together, let the module before it hand on all of them (output_layouts=Replicate())",
            stacklevel=2,
        )
    return bool(batched)
