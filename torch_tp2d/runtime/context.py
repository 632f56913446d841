"""The state that the modules on one mesh have in common while a step runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakIdKeyDictionary

from .._torch_compat.distributed import root_mesh
from .._torch_compat.tensors import SELECTIVE_MODES, current_graph_task_id, dispatch_modes
from ..mesh.layouts import Layout, describe_mesh
from .accumulation import Accumulation
from .unseen import UnseenChanges
from .versions import versions

if TYPE_CHECKING:
    from .prefetch import Pass
    from .reductions import Backward

__all__ = [
    "Context",
    "OnBehalf",
    "Sizes",
    "Watch",
    "autocast_dtype",
    "context_of",
    "directly",
    "in_backward",
    "selective_region",
]

Sizes = tuple[int, ...]
OnBehalf = Callable[..., Any]
"""Calls a function, its first argument, on behalf of a module."""
Attribute = Callable[[nn.Module | None], OnBehalf]


def directly(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function on behalf of nobody in particular."""
    return function(*args)


def in_backward() -> bool:
    """Whether autograd is running a backward, in which checkpointing may recompute modules."""
    return current_graph_task_id() != -1


def selective_region() -> Any:
    """The region of selective checkpointing that is being run or recomputed; None outside."""
    modes = dispatch_modes()
    return next((m for m in modes if isinstance(m, SELECTIVE_MODES)), None) if modes else None


def autocast_dtype(device: str) -> torch.dtype | None:
    """The dtype of products under autocast; None where it is off, and for meta tensors."""
    on = device != "meta" and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if on else None


class Watch(Protocol):
    """Is told what styles see of the user's code in a model's first forward."""

    def attends(self, query: Tensor, mask: Tensor) -> None:
        """Attention was called with a mask that is given for this rank's heads and queries."""

    def declared(self, x: Tensor, layout: Layout) -> None:
        """The user's code has made a tensor, and the user says its layout on the mesh by a pair."""

    def lies_elsewhere(self, x: Tensor, layout: Layout) -> str:
        """Which dim ``tp_col`` splits of a tensor, if on the mesh ``layout`` splits another."""

    def holds(self, x: Tensor, layout: Layout, *, certain: bool, takes_fused: bool) -> str:
        """What a tensor that a module takes in ``layout`` holds instead, and what to do.

        Args:
            certain: the user declared the layout on both axes.
            takes_fused: the module may take features of several projections, of each a part.
        """

    def refuses(self, said: str) -> None:
        """The user's code is wrong where a rank has a part, as tokens made of others of it are.

        Args:
            said: what is wrong where, and what to do, the same on every rank.
        """


class Context:
    """What the modules on one mesh know of the step that they are a part of.

    Nothing in it depends on when a rank collects garbage: whatever decides about a collective is
    held by a strong reference and released at points that every rank passes, the beginning and the
    end of a model's forward and of a backward.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.of = describe_mesh(mesh)
        self.tokens: Sizes | None = None
        """Batch and sequence size of the tokens under way, as far as they are known.

        A local tensor of unknown origin is taken for a shard of these tokens, so that the ranks
        need not exchange sizes; a shard that does not fit them is an error. They are written by the
        embedding, where the ids are replicated, and by each module that is given tensors of known
        sizes: with an encoder and a decoder, or a block that is recomputed for backward, they are
        those of the module that runs. A user sets them by :class:`~torch_tp2d.token_sizes`.
        """
        self.taken = WeakIdKeyDictionary()
        """The versions of DTensors when a style took them in this forward."""
        self.embedded: Sizes | None = None
        """Batch and sequence size of what an embedding split over the rows in this forward."""
        self.running: Pass | None = None
        """The running forward, of a model that :func:`torch_tp2d.parallelize_module` was given."""
        self.gathered = TensorMemo()
        """Gathered inputs, for other modules that are given the same tensor."""
        self.twins = TensorMemo()
        """What styles use instead of an input that was gathered for a module around them."""
        self.whole_leaves = WeakIdKeyDictionary()
        """The user's own tensors whose gradients attention sums, to be known in a recomputation."""
        self.compared: WeakSet[nn.Module] = WeakSet()
        """Modules whose inputs from outside the plan were compared over the mesh rows."""
        self.followed: WeakKeyDictionary[nn.Module, tuple[Layout, ...]] = WeakKeyDictionary()
        """Modules, and layouts, of which it was looked up what their local inputs are made of."""
        self.backwards: dict[int, Backward] = {}
        """The running backward passes, by autograd's graph task id."""
        self.in_attention = False
        """Whether an :class:`~torch_tp2d.Attention2D` runs its module, which has this rank's heads.

        Our plans tell the styles inside when they are applied, but torch's own
        ``parallelize_module`` applies each style alone.
        """
        self.fuses = False
        """Whether a Linear on the mesh leaves transfers along ``tp_col`` to fused operators.

        Then a module around the Linear leaves the gather of its input to it as well.
        """
        self.keys_drawn = 0
        """How many dropout keys the ranks of the mesh have drawn."""
        self.unseen = UnseenChanges(self.of)
        """Changes of parameters that only their values show, which the ranks tell each other."""
        self.accumulation = Accumulation(self.unseen)
        """What the micro-batches of a step keep for the last one."""
        self.watch: Watch | None = None
        """While a first forward is watched (:mod:`torch_tp2d.parallelize.local_sizes`)."""
        self.attribute: Attribute | None = None
        """Set while transfers are attributed to modules (:mod:`torch_tp2d.planner.trace`)."""

    def __repr__(self) -> str:
        under_way = [] if self.running is None else [repr(self.running)]
        under_way += map(repr, self.backwards.values())
        under_way += [repr(self.accumulation)] if self.accumulation else []
        said = ", ".join(under_way) or "nothing under way"
        return f"Context(mesh={self.of}, tokens={self.tokens}, {said})"

    def on_behalf_of(self, module: nn.Module | None = None) -> OnBehalf:
        """What calls a function that works ahead for a module, or that the module has deferred.

        Args:
            module: None is the one that runs now.
        """
        return directly if self.attribute is None else self.attribute(module)

    def forget(self) -> None:
        """Drop what was kept of a forward; called when one begins or has ended.

        Not the twins: what checkpointing recomputes in backward is given the very tensors of the
        first run. A twin is asked for by its tensor, and kept no longer than that.
        """
        self.embedded = None
        self.gathered.clear()
        if self.taken.data:
            self.taken = WeakIdKeyDictionary()


class TensorMemo:
    """Maps tensors to values; an entry is valid while its tensor lives and is not changed."""

    def __init__(self) -> None:
        self._entries = WeakIdKeyDictionary()

    def put(self, x: Tensor, key: Any, value: Any) -> None:
        """Keep ``value`` for ``x``, replacing an earlier value."""
        self._entries[x] = (key, _state(x), value)

    def get(self, x: Tensor, key: Any) -> Any:
        """The value put for this very tensor under the same key; None if it was changed since."""
        if not self._entries.data:
            return None
        entry = self._entries.get(x)
        if entry is None or entry[0] != key or entry[1] != _state(x):
            return None
        return entry[2]

    def clear(self) -> None:
        if self._entries.data:
            self._entries = WeakIdKeyDictionary()


def _state(x: Any) -> tuple[Any, ...]:
    """A state that differs once a tensor is changed in a way that torch sees."""
    return x.requires_grad, torch.is_grad_enabled(), selective_region(), *versions(x)


_contexts = WeakIdKeyDictionary()


def context_of(mesh: DeviceMesh) -> Context:
    """The context of a mesh.

    All slices of one ``init_device_mesh`` have one context. Another mesh has its own, even if the
    two compare equal, so that a model without an embedding can be given one for itself.
    """
    root = root_mesh(mesh)
    if root not in _contexts:
        _contexts[root] = Context(root)
    return _contexts[root]
