"""What a plan says of the tensors around a module, for the styles that need it."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch.distributed.tensor as dt
from torch import nn

from ..styles.attention import Attention2D
from ..styles.dropout import Dropout2D, DropoutInside
from ..styles.lifted import Lifted
from ..styles.linear import Colwise2D, Rowwise2D
from ..styles.local import Local2D
from ..styles.module_kinds import embeds, is_conv1d, is_linear
from ..styles.norm import Norm2D
from ..styles.replicated import Replicate
from ..styles.surroundings import Surroundings, is_of_features, width_of
from .resolve import LINEAR_STYLES, Entry, features_of, nearest, unlifted


def with_surroundings(entries: list[Entry]) -> list[Entry]:
    """The entries, each style that needs it told what the plan says of the tensors around it."""
    beside, taking = defaultdict(list), defaultdict(list)
    giving = set()
    for entry in entries:
        style = unlifted(entry)
        if isinstance(style, Colwise2D) and not style.use_local_output:
            giving.add(id(entry.module))
        linear = is_linear(entry.module) or is_conv1d(entry.module)
        if isinstance(style, LINEAR_STYLES) and linear:
            width, out_width = features_of(entry.module)
            taking[id(entry.parent)].append((width, style.input_layouts[1]))
            if style.use_local_output:
                # The user's code splits a fused output, so its parts' widths may occur there too.
                for features in {out_width, *style.part_sizes(out_width)}:
                    beside[id(entry.parent)].append((features, style.output_layouts[1]))
    told = []
    for entry in entries:
        if isinstance(entry.style, Dropout2D | DropoutInside | Local2D | Replicate):
            # A copy: one plan entry may name modules in several places.
            style = copy.copy(entry.style)
            style.surroundings = _surroundings(entry.name, entry.module, entries)
            if isinstance(style, Dropout2D | DropoutInside):
                style.beside = [*style.beside, *beside[id(entry.parent)]]
            if isinstance(style, DropoutInside):
                style.taking = taking[id(entry.parent)]
            entry = entry._replace(style=style)
        elif isinstance(entry.style, Lifted):
            entry = entry._replace(style=entry.style.beside(giving))
        told.append(entry)
    return told


def _surroundings(name: str, module: nn.Module, entries: list[Entry]) -> Surroundings:
    """What the entries of a plan say of the tensors that reach the module of this name."""
    parts = name.split(".")
    around = [".".join(parts[:depth]) for depth in range(len(parts))]
    split: list[str] = []
    streams: set[Any] = set()
    inputs: set[Any] = set()
    widths: set[int] = set()
    # Besides the stream, this module may be given outputs of its width from modules beside it.
    own_width, outputs = width_of(module), set()
    # A module beside it whose input is prepared takes the stream as it is before the preparation.
    apart = {e.name: have for e in entries if e.name not in around for have in _before(e)}
    outer = (n for n in apart if not any(n.startswith(f"{other}.") for other in apart))
    inputs |= {apart[n] for n in outer} & _STREAMS
    in_attention = False
    for entry in entries:
        style: Any = unlifted(entry)
        linear: Any = entry.module
        if isinstance(style, Attention2D):
            in_attention |= entry.name in around
        if isinstance(style, Norm2D | Replicate) and entry.name.rpartition(".")[0] == around[-1]:
            # Without an autograd graph, nothing tells which of these outputs a tensor is made of.
            handed = style.output_layouts or style.input_layouts
            fits = own_width in (None, width_of(entry.module))
            outputs |= {handed[1]} & _STREAMS if fits and handed is not None else set()
        if not isinstance(style, LINEAR_STYLES):
            continue
        takes, gives = style.input_layouts[1], style.output_layouts[1]
        if embeds(linear):
            widths.add(int(linear.weight.shape[1]))
            streams |= {gives} & _STREAMS
        elif is_linear(linear) or is_conv1d(linear):
            in_features, out_features = features_of(linear)
            if not is_of_features(takes):
                widths.add(in_features)
                inside = any(entry.name.startswith(f"{other}.") for other in apart)
                inputs |= set() if inside else {takes} & _STREAMS
            if isinstance(style, Rowwise2D) and not is_of_features(gives):
                widths.add(out_features)
                streams |= {gives} & _STREAMS
            shares = style.grad_layouts is not None and style.grad_layouts[1].is_partial()
            beside = entry.name.rpartition(".")[0] in around[-2:]
            if beside and style.use_local_output and (is_of_features(gives) or shares):
                split.append(entry.name)
            if entry.name.rpartition(".")[0] == around[-1] and style.use_local_output:
                outputs |= {gives} & _STREAMS if own_width in (None, out_features) else set()
    for above in reversed(around):
        prepared = list(_prepared(above, entries))
        if prepared:
            # Inside a prepared module, tokens are laid out as prepared, or as a Rowwise gives them.
            within = [entry for entry in entries if entry.name.startswith(f"{above}.") or not above]
            streams, inputs = {prepared[0], *_given(within)}, set()
            break
    # The layouts may differ: a model's own input may be replicated, its Rowwise outputs split.
    found = list(streams | inputs)
    stream = found[0] if len(found) == 1 and found[0] in _STREAMS else None
    if stream is not None and not outputs <= {stream}:
        stream = None
    linears = [e for e in entries if isinstance(unlifted(e), LINEAR_STYLES)]
    axes = frozenset(unlifted(entry).axes for entry in nearest(name, linears))
    return Surroundings(stream, frozenset(widths), tuple(split), in_attention, axes)


def _given(entries: list[Entry]) -> Iterator[Any]:
    """How tp_col splits the tokens of the outputs of Rowwise entries."""
    for entry in entries:
        style = unlifted(entry)
        if isinstance(style, Rowwise2D) and not is_of_features(style.output_layouts[1]):
            yield style.output_layouts[1]


_STREAMS = frozenset((dt.Shard(1), dt.Replicate()))


def _prepared(name: str, entries: list[Entry]) -> Iterator[Any]:
    """The ``tp_col`` placement to which an entry prepares this module's first input, if any."""
    for entry in entries:
        if entry.name == name:
            yield from [one.want[1] for one in _inputs(entry)][:1]


def _before(entry: Entry) -> list[Any]:
    """The ``tp_col`` placement of a module's first input before the plan's preparation, if any."""
    return [one.have[1] for one in _inputs(entry)][:1]


def _inputs(entry: Entry) -> list[Any]:
    inputs = getattr(unlifted(entry), "inputs", None)
    given = () if inputs is None else (*(inputs.args or ()), *inputs.kwargs.values())
    return [one for one in given if one is not None]
