"""How hypothesis draws programs."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from .data import Attention, Embed, Head, How, Mlp, Model, Norm, Op, Program

__all__ = ["DEEP_GRIDS", "GRIDS", "programs"]

GRIDS = ((1, 1), (1, 2), (2, 1), (2, 2), (1, 4), (4, 1))
DEEP_GRIDS = (*GRIDS, (2, 3), (3, 2), (2, 4), (3, 3))

_ALGORITHMS = ("auto", "collective", "pipelined", "fused", "summa", "bmr", "cannon")
_bool = st.booleans()
_sizes = st.sampled_from((8, 4, 5, 6, 3, 9, 1, 2))


def _mostly(plain: Any, *others: Any) -> Any:
    return st.sampled_from((plain,) * (2 * len(others)) + others)


def _how(styles: tuple[str, ...]) -> Any:
    return st.builds(
        How,
        style=st.sampled_from(styles),
        algorithm=_mostly(*_ALGORITHMS),
        dataflow=_mostly("auto", "own", "weight_stationary"),
        reshard=st.sampled_from((None, True, False)),
        regather=_mostly(False, True),
        local=_mostly(True, False),
    )


_COLWISE = ("colwise", "colwise", "stock_colwise", "block", "rowwise", "replicate", "local")
_ROWWISE = ("rowwise", "rowwise", "stock_rowwise", "colwise", "block", "replicate", "local")


def _norms(stream: str) -> Any:
    return st.none() | st.builds(
        Norm,
        kind=st.sampled_from(("layer", "rms")),
        style=st.sampled_from(("unnamed", "replicate", "declared", "sequence", "norm2d", "local")),
        out=st.sampled_from(("whole", "tokens", "features") if stream != "flat" else ("whole",)),
        bias=_bool,
        local=_mostly(True, False),
    )


@st.composite
def _mlp(draw: Any, stream: str) -> Mlp:
    return Mlp(
        inner=draw(_sizes),
        gate=draw(_mostly(False, True)),
        bias=draw(_bool),
        norm=draw(_norms(stream)),
        residual=draw(_mostly(True, False)),
        between=draw(_mostly("features", "whole", "tokens")),
        prepare=draw(_mostly(False, True)),
        after=draw(_mostly("", "whole", "tokens")),
        conv=draw(_mostly(False, True)),
        fused=draw(_mostly(False, True)),
        beta=draw(_mostly("", "unnamed", "declared", "local")),
        scale=draw(_mostly("", "columns", "replicate")),
        mix=draw(_mostly("", "unnamed", "declared", "local")),
        keyword=draw(_bool),
        pooled=draw(_mostly("", "mean", "sum")),
        dropout=draw(_mostly("", "unnamed", "declared")),
        up=draw(_how(_COLWISE)),
        down=draw(_how(_ROWWISE)),
    )


@st.composite
def _attention(draw: Any, stream: str) -> Attention:
    kv_heads = draw(st.sampled_from((2, 1, 4, 3)))
    return Attention(
        heads=kv_heads * draw(st.sampled_from((1, 2, 3))),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from((2, 3, 1))),
        bias=draw(_bool),
        norm=draw(_norms(stream)),
        residual=draw(_mostly(True, False)),
        causal=draw(_bool),
        qk_norm=draw(_mostly("", "unnamed", "declared")),
        plan=draw(st.sampled_from(("attention2d", "local", "dtensor", "whole"))),
        algorithm=draw(st.sampled_from(("auto", "ring", "gather", "two_phase"))),
        prepare=draw(_bool),
        conv=draw(_mostly(False, True)),
        fused=draw(_mostly(False, True)),
        cross=draw(_mostly(False, True)),
        dropout=draw(_mostly(False, True)),
        table=draw(_mostly("", "whole", "dtensor", "local", "heads", "columns")),
        one_for_all=draw(_mostly(False, True)),
        up=draw(_how(_COLWISE[:5])),
        down=draw(_how(("rowwise", "rowwise", "stock_rowwise", "block"))),
    )


@st.composite
def _models(draw: Any, embeds: bool) -> Model:
    hidden = draw(_sizes)
    stream = draw(st.sampled_from(("whole", "tokens", "tokens", "features", "hidden", "flat")))
    embed = head = None
    if embeds:
        styles = ("rowwise", "colwise", "stock_rowwise", "stock_colwise", "replicate")
        embed = Embed(
            vocab=draw(_sizes),
            style=draw(st.sampled_from(styles)),
            scale=draw(_mostly(1.0, 3.0)),
            positions=draw(_mostly("", *styles)),
        )
    blocks: Any = _mlp(stream)
    if stream in ("whole", "tokens", "features"):
        blocks = blocks | _attention(stream)
    drawn = tuple(draw(st.lists(blocks, max_size=3, min_size=0 if embeds else 1)))
    if draw(_bool):
        tied = bool(embed and embed.style != "replicate" and draw(_bool))
        head = Head(
            features=embed.vocab if tied and embed else draw(_sizes),
            tied=tied,
            bias=draw(_bool),
            out=draw(st.sampled_from(("features", "whole", "tokens", "everywhere"))),
            how=draw(_how(_COLWISE[:5])),
        )
    return Model(
        hidden=hidden,
        stream=stream,
        local=draw(_bool),
        row_dim=draw(_mostly(0, 1)),
        axes=draw(_mostly("tp_col", "tp_row", "both")),
        apply=draw(_mostly("whole", "torch", "blocks")),
        embed=embed,
        blocks=drawn,
        norm=draw(_norms(stream)),
        head=head,
    )


_index = st.integers(0, 6)


def _forwards(*modes: str) -> Any:
    return st.builds(Op, **_forward_fields, mode=_mostly(*modes))


_forward_fields: Any = dict(
    what=st.just("forward"),
    model=_mostly(0, 1),
    size=st.tuples(st.sampled_from((2, 4, 3, 1, 5)), st.sampled_from((4, 8, 3, 5, 1, 2, 0))),
    skip=_mostly((), (0,), (1,), (0, 1)),
    twice=_mostly((), (0,), (1,)),
    again=_mostly("", "same", "data", "copy", "local"),
    learns=_mostly(True, False),
    loss=st.sampled_from(("local", "full", "entropy")),
    index=_index,
)
_training = _forwards("train", "full", "selective", "chain")
_forward = _forwards("train", "no_grad", "inference", "raise", "full", "selective", "chain")
_backward = st.builds(
    Op,
    what=_mostly("backward", "grad"),
    last=_bool,
    how=_mostly("", "sum"),
    retain=_mostly(False, True),
    index=_index,
)
_other = st.one_of(
    st.builds(Op, what=st.sampled_from(("deepcopy", "save", "load", "drop")), model=_mostly(0, 1)),
    st.builds(Op, what=st.just("hold"), how=_mostly("", "discard", "exception")),
    st.builds(Op, what=st.sampled_from(("collect", "log", "exchange")), index=_index),
    st.builds(
        Op,
        what=st.just("step"),
        model=_mostly(0, 1),
        how=st.sampled_from(("sgd", "adamw", "foreach", "fused")),
    ),
    st.builds(Op, what=st.just("zero"), model=_mostly(0, 1), how=st.sampled_from(("", "zeros"))),
    st.builds(
        Op,
        what=st.sampled_from(("freeze", "thaw", "swap")),
        model=_mostly(0, 1),
        index=st.integers(-1, 12),
    ),
    st.builds(
        Op,
        what=_mostly("change", "hook"),
        model=_mostly(0, 1),
        index=st.integers(-1, 12),
        how=st.sampled_from(("copy", "data", "local", "foreach")),
    ),
)


@st.composite
def programs(draw: Any, grids: tuple[tuple[int, int], ...] = GRIDS) -> Program:
    embeds = draw(_bool)
    models = [draw(_models(embeds))]
    if draw(_mostly(False, True)):
        models.append(draw(_models(embeds)))
    steps = st.lists(st.one_of(_forward, _backward, _backward, _other), max_size=10)
    use = (draw(_forward), *draw(steps), draw(_training), Op("backward", last=True))
    grid = draw(st.sampled_from(grids))
    fsdp = draw(_mostly("", "keep", "reshard"))
    return Program(
        grid=grid,
        models=tuple(models),
        use=use,
        fsdp=fsdp,
        dp=draw(st.sampled_from((1, 2))) if fsdp and grid[0] * grid[1] < 4 else 1,
        rates=draw(_mostly(False, True)),
    )
