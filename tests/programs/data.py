"""What a random program is: frozen dataclasses, whose ``repr`` can be pasted into a test.

The first value of every field is the plainest, to which a failing program is simplified.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

__all__ = [
    "TRAIN",
    "Attention",
    "Block",
    "Embed",
    "Head",
    "How",
    "Mlp",
    "Model",
    "Norm",
    "Op",
    "Program",
]


class _Brief:
    """A ``repr`` that leaves out what is as by default."""

    def __repr__(self) -> str:
        given = []
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if value != field.default:
                given.append(f"{field.name}={value!r}")
        return f"{type(self).__name__}({', '.join(given)})"


@dataclass(frozen=True, repr=False)
class How(_Brief):
    """The style of a Linear; its layouts follow from what stands before and after it."""

    style: str = "colwise"
    """colwise, rowwise, block, stock_colwise, stock_rowwise, replicate or local."""
    algorithm: str = "auto"
    dataflow: str = "auto"
    """auto, own or weight_stationary."""
    reshard: bool | None = None
    regather: bool = False
    local: bool = True
    """use_local_output, where the next module does not decide it."""


@dataclass(frozen=True, repr=False)
class Norm(_Brief):
    kind: str = "layer"
    """layer or rms."""
    style: str = "unnamed"
    """unnamed, replicate, declared, sequence, norm2d or local."""
    out: str = "whole"
    """The layout that a norm2d hands on: whole, tokens or features."""
    bias: bool = True
    local: bool = True


@dataclass(frozen=True, repr=False)
class Mlp(_Brief):
    inner: int = 8
    gate: bool = False
    bias: bool = True
    norm: Norm | None = None
    residual: bool = True
    between: str = "features"
    """The layout between up and down: features, whole or tokens."""
    prepare: bool = False
    """Whether a PrepareModuleInput gathers what the module is given."""
    after: str = ""
    """A layout from which a PrepareModuleOutput brings the output to the stream's; "" is none."""
    conv: bool = False
    """Whether the Linears are Conv1Ds, as Hugging Face's, whose weight is [in, out]."""
    fused: bool = False
    """Whether up and gate are one weight, with parts=2 where its output is split."""
    beta: str = ""
    """The style of an activation that learns: unnamed, declared or local; "" is a gelu."""
    scale: str = ""
    """The style of a gate of each token beside these features: columns or replicate."""
    mix: str = ""
    """The style of a residual that learns, a module of two tensors: unnamed, declared or local."""
    keyword: bool = False
    """Whether the residual that learns is called by keywords."""
    pooled: str = ""
    """Of DTensors: mean or sum over the tokens of a sample, by which a Linear gates the block."""
    dropout: str = ""
    """The style of dropout between up and down, and after down: unnamed or declared."""
    up: How = How()
    down: How = How("rowwise")


@dataclass(frozen=True, repr=False)
class Attention(_Brief):
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 2
    bias: bool = True
    norm: Norm | None = None
    residual: bool = True
    causal: bool = True
    qk_norm: str = ""
    """The style of a norm on the heads of queries and keys: unnamed or declared; "" is no norm."""
    plan: str = "attention2d"
    """attention2d; where heads divide and rows have whole sequences also local, dtensor, whole."""
    algorithm: str = "auto"
    """Of attention2d with row_dim=1: auto, ring, gather or two_phase."""
    prepare: bool = False
    conv: bool = False
    fused: bool = False
    """Whether q, k and v are one weight, with parts=3, where there are as many of each."""
    cross: bool = False
    """Whether keys and values are of the other stream of tokens, where the model embeds."""
    dropout: bool = False
    """Whether attention weights are dropped, by the module's own call."""
    table: str = ""
    """How a table of biases by distance is held: whole, dtensor, local, heads or columns."""
    one_for_all: bool = False
    """Whether all heads have one bias."""
    up: How = How()
    down: How = How("rowwise")


Block = Mlp | Attention


@dataclass(frozen=True, repr=False)
class Embed(_Brief):
    vocab: int = 8
    style: str = "rowwise"
    """rowwise, colwise, stock_rowwise, stock_colwise or replicate."""
    scale: float = 1.0
    """By which a forward of its own, as Gemma's, multiplies its output."""
    positions: str = ""
    """The style of a position embedding, likewise; "" is none."""


@dataclass(frozen=True, repr=False)
class Head(_Brief):
    features: int = 8
    """Of its output; the vocabulary where tied."""
    tied: bool = False
    bias: bool = False
    out: str = "features"
    """features, whole, tokens or everywhere."""
    how: How = How()


@dataclass(frozen=True, repr=False)
class Model(_Brief):
    hidden: int = 8
    stream: str = "whole"
    """The layout of the residual stream: whole, tokens, features, hidden or flat."""
    local: bool = True
    """Whether the stream is local tensors, else DTensors."""
    row_dim: int = 0
    axes: str = "tp_col"
    """The axes of stock styles, of which the whole plan is then made: tp_col, tp_row or both."""
    apply: str = "whole"
    """By torch_tp2d's parallelize_module; also torch, by torch's own; blocks, for each block first.
    """
    embed: Embed | None = None
    blocks: tuple[Block, ...] = ()
    norm: Norm | None = None
    head: Head | None = None


@dataclass(frozen=True, repr=False)
class Op(_Brief):
    """One thing that is done with the models.

    ==============  =========================================================================
    forward         ``model``, ``size`` (batch and sequence; sequence 0: ``[batch, hidden]``),
                    ``learns``: whether the input does; ``mode``: train, no_grad, inference, raise
                    (in block ``index``), full or selective (checkpointing), chain (model 1 of model
                    0);
                    ``skip`` and ``twice``: blocks; ``again``: "" for a fresh input, same, or the
                    last one refilled by data, copy or local; ``loss``: local, full or entropy
    backward        of the oldest pending forward, or (``last``) the newest; ``retain``;
                    ``how``: sum for one backward of all that are pending
    grad            torch.autograd.grad of some parameters (``index`` picks) and the input
    drop            the pending graphs, in a cycle that only garbage collection frees
    step            ``how``: sgd, adamw, foreach or fused
    zero            ``how``: none or zeros
    freeze, thaw    parameter ``index`` of ``model``; all of them with index -1
    swap            parameter ``index`` for a new nn.Parameter
    change          parameter ``index`` by ``how``: copy, data, local or foreach
    hook            a forward pre-hook on block ``index`` that changes its first weight's data
    log             hooks on block ``index`` that look and change nothing
    exchange        the first block and the last, and their places
    deepcopy        the model goes on as its copy
    save, load      a state dict, in memory
    collect         garbage, on rank ``index`` only
    hold            no_sync begins; backwards, and forwards between them, are micro-batches until it
                    ends by the next of these, by ``how`` "exception" or "discard" given up, or by
                    the program's last forward; what would change parameters meanwhile is left out
    ==============  =========================================================================
    """

    what: str = "forward"
    model: int = 0
    size: tuple[int, int] = (2, 4)
    mode: str = "train"
    skip: tuple[int, ...] = ()
    twice: tuple[int, ...] = ()
    again: str = ""
    learns: bool = True
    loss: str = "local"
    last: bool = False
    retain: bool = False
    index: int = 0
    how: str = ""


TRAIN = (Op(), Op("backward"))


@dataclass(frozen=True, repr=False)
class Program(_Brief):
    grid: tuple[int, int] = (1, 1)
    models: tuple[Model, ...] = (Model(),)
    use: tuple[Op, ...] = TRAIN
    fsdp: str = ""
    """FSDP2 outside, over an axis of ``dp`` that is given the same tokens: keep or reshard."""
    dp: int = 1
    rates: bool = False
    """Whether "auto" knows rates by which weights stay where tokens are few."""
    compiled: bool = False
    """Whether the blocks are compiled on the grid, as far as torch can."""


def simpler(value: Any) -> Any:
    """Programs a little simpler than this one, the boldest first."""
    if isinstance(value, tuple) and not all(isinstance(item, int) for item in value):
        size = len(value)
        while size:
            for start in range(0, len(value), size):
                yield value[:start] + value[start + size :]
            size //= 2
        for place, item in enumerate(value):
            for less in simpler(item):
                yield value[:place] + (less,) + value[place + 1 :]
    elif isinstance(value, _Brief):
        for field in fields(value):  # type: ignore[arg-type]
            now = getattr(value, field.name)
            if now == field.default or field.name == "what":
                continue
            default = field.default if field.name not in ("grid", "models", "use") else now
            options = [default] if default != now else []
            if isinstance(now, tuple | _Brief):
                options += list(simpler(now))
            for option in options:
                changed = {**{f.name: getattr(value, f.name) for f in fields(value)}}  # type: ignore[arg-type]
                changed[field.name] = option
                yield type(value)(**changed)
