"""Random models under random plans in random use, on a grid beside one device in fp64.

A program is right, or it is refused by a clear error on all ranks (``programs.ranks.REFUSED``);
a wrong number, a hang, an error on some ranks only and any other error fail the test. The failing
program is printed as data, simplified; ``check(Program(...))`` makes a plain test of it.

``TP2D_PROGRAMS=2000 TP2D_SEED=7`` draws that many others; ``python -m programs`` in ``tests/``
goes on after a failure, and sorts what it finds.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator

import hypothesis
import pytest

from programs import Program, data
from programs.data import simpler
from programs.draw import DEEP_GRIDS, GRIDS, programs
from programs.ranks import Worlds, shrink
from support.marks import deep

COUNT = 50
DEEP_COUNT, COMPILED_COUNT = 500, 30
SHRINKING = 60.0
"""Seconds spent on simplifying a failing program."""


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    with Worlds() as opened:
        yield opened


def check(program: Program, worlds: Worlds) -> None:
    outcome = worlds.play(program)
    if not outcome.failed:
        return
    again = worlds.play(program, fresh=True)
    if not again.failed:
        pytest.fail(
            f"{program!r}\nfailed only after others in the same processes: {outcome.kind}\n"
            f"{outcome.text}"
        )

    def fails(candidate: Program) -> bool:
        return worlds.play(candidate).signature == again.signature

    small = shrink(program, fails, simpler, SHRINKING)
    outcome = worlds.play(small, fresh=True)
    pytest.fail(
        f"{outcome.kind}: {outcome.text}\n\nworlds.play(\n    {small!r}\n)\n", pytrace=False
    )


def _run(
    worlds: Worlds, grids: tuple[tuple[int, int], ...], count: int, *, compiled: bool = False
) -> None:
    chosen = "TP2D_SEED" in os.environ

    @hypothesis.settings(
        max_examples=int(os.environ.get("TP2D_PROGRAMS", count)),
        derandomize=not chosen,
        # Simplified by ourselves, as data: a hang takes too long for hypothesis to meet it often.
        phases=[hypothesis.Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(programs(grids))
    def draw(program: Program) -> None:
        check(dataclasses.replace(program, compiled=compiled), worlds)

    if chosen:
        draw = hypothesis.seed(int(os.environ["TP2D_SEED"]))(draw)
    draw()


def test_random_programs(worlds: Worlds) -> None:
    _run(worlds, GRIDS, COUNT)


@pytest.mark.deep
def test_more_random_programs_on_larger_grids(worlds: Worlds) -> None:
    _run(worlds, DEEP_GRIDS, DEEP_COUNT)


@pytest.mark.deep
def test_random_programs_in_compiled_blocks(worlds: Worlds) -> None:
    _run(worlds, GRIDS, COMPILED_COUNT, compiled=True)


FOUND = {
    # An input filled anew between two forwards was taken for one written into in a forward.
    "one input for two batches": """
        Program(grid=(2, 1), models=(Model(local=False, apply='torch', head=Head()),),
        use=(Op(), Op(again='copy')))
    """,
    # One element of tokens beside a module's input was taken for a scalar, on the rank that has it.
    "one element beside the input": """
        Program(grid=(2, 2), models=(Model(hidden=3, stream='hidden', blocks=(Mlp(inner=9,
        gate=True, norm=Norm(kind='rms', style='replicate', out='tokens', bias=False),
        after='tokens', conv=True, fused=True, mix='unnamed', up=How(algorithm='bmr', reshard=True,
        regather=True), down=How(style='replicate', algorithm='collective',
        dataflow='weight_stationary', reshard=True)),), head=Head(out='everywhere',
        how=How(reshard=True))),), use=(Op(size=(1, 3), mode='no_grad', twice=(0,), again='data',
        loss='full', index=5),))
    """,
    # Samples over tp_col, by styles on other axes, were taken for what lies in another dim.
    "samples over the columns": """
        Program(grid=(1, 4), models=(Model(stream='tokens', axes='tp_row',
        norm=Norm(kind='rms', style='declared', bias=False, local=False), head=Head(features=2,
        out='everywhere', how=How(style='rowwise', dataflow='weight_stationary'))),),
        use=(Op(size=(4, 3)), Op('backward', last=True)))
    """,
    # A table that is whole on every rank got the gradient of one column's heads, in silence.
    "a table of biases": """
        Program(grid=(2, 2), models=(Model(local=False, blocks=(Attention(table='whole'),)),))
    """,
    # torch leaves a bias out of the graph of an empty output; the others waited for its gradient.
    "a table of biases where a row has no samples": """
        Program(grid=(2, 2), models=(Model(local=False, blocks=(Attention(table='whole',
        norm=Norm(style='sequence')),)),), use=(Op(size=(1, 0)), Op('backward', last=True)))
    """,
    # torch's error of operators that a recomputation adds: the first copy of what is kept.
    "micro-batches that begin between a forward with selective checkpointing and its backward": """
        Program(grid=(4, 1), models=(Model(local=False, row_dim=1, blocks=(Attention(),)),),
        use=(Op(size=(3, 8), mode='selective'), Op('hold'), Op('backward', last=True)))
    """,
    # A row without input features had an error in sizes worked out of nothing; the others hung.
    "a fused projection of fewer features than rows": """
        Program(grid=(2, 2), models=(Model(hidden=1, blocks=(Mlp(fused=True),)),), use=(Op(),))
    """,
    # Half of the heads' masks for all of them, where a projection hands on split features.
    "dropout of whole heads": """
        Program(grid=(3, 2), models=(Model(stream='features',
        blocks=(Attention(plan='whole', algorithm='gather', conv=True, fused=True,
        dropout=True, up=How(style='rowwise', reshard=False, local=False),
        down=How(style='stock_rowwise', algorithm='summa', dataflow='own', regather=True,
        local=False)),), norm=Norm(kind='rms', style='norm2d')),), use=(Op(size=(1, 3),
        skip=(0,), loss='full', index=3), Op(model=1, size=(1, 1), loss='full', index=6),
        Op(what='backward', last=True)), fsdp='reshard', rates=True)
    """,
    # No sum along tp_col for a norm of whole heads, of which each rank uses its own queries: by
    # torch's own parallelize_module a style hears nothing of the attention around it.
    "a norm of whole heads, applied by torch, under FSDP2": """
        Program(grid=(2, 3), models=(Model(apply='torch', blocks=(Attention(head_dim=1,
        norm=Norm(kind='rms', style='sequence', out='tokens', local=False), causal=False,
        qk_norm='declared', plan='dtensor', algorithm='two_phase', prepare=True, conv=True,
        up=How(style='block', algorithm='cannon', dataflow='own', regather=True),
        down=How(style='stock_rowwise', dataflow='own', reshard=True)),)),),
        use=(Op(size=(2, 5), loss='entropy', index=1), Op(what='thaw', index=8),
        Op(what='exchange', index=2), Op(what='change', model=1, index=7, how='foreach'),
        Op(model=1, size=(2, 3), skip=(0, 1), again='copy', learns=False, index=5),
        Op(size=(5, 5), mode='full', skip=(0, 1), loss='entropy', index=2),
        Op(what='backward', last=True)), fsdp='reshard', rates=True)
    """,
    # No sum along tp_col for a norm of one feature: it has no width by which heads are known.
    "a norm of heads of one feature": """
        Program(grid=(2, 2), models=(Model(blocks=(Attention(kv_heads=1, head_dim=1,
        qk_norm='declared'),)),))
    """,
    # Ranks without queries did not ask the others for the lengths: the process died.
    "dropout of attention weights where a row has no queries": """
        Program(grid=(2, 1), models=(Model(row_dim=1, blocks=(Attention(dropout=True),)),),
        use=(Op(size=(3, 1)), Op('backward')))
    """,
    # A rank that neither axis gives tokens kept the stand-in of one; it raised, the others hung.
    "what the user makes of tokens, on a rank without samples and without a sequence": """
        Program(grid=(2, 4), models=(Model(stream='tokens', axes='tp_row', embed=Embed(vocab=2,
        scale=3.0), norm=Norm(style='replicate', out='features', bias=False, local=False)),),
        use=(Op(size=(5, 1)), Op('backward')))
    """,
    # A row's stand-in was not put back where the columns have no tokens either.
    "an activation that learns, between empty rows and empty columns": """
        Program(grid=(3, 3), models=(Model(local=False, embed=Embed(positions='stock_colwise'),
        blocks=(Mlp(inner=3, bias=False, norm=Norm(style='norm2d', out='features', bias=False),
        prepare=True, up=How(style='replicate', algorithm='bmr', reshard=True, local=False),
        down=How(style='block', reshard=False, local=False)), Mlp(inner=3, gate=True,
        norm=Norm(kind='rms', style='declared', out='tokens', bias=False), between='tokens',
        conv=True, beta='unnamed', dropout='unnamed', up=How(style='rowwise', reshard=True),
        down=How(style='replicate', dataflow='weight_stationary', reshard=True))),
        head=Head(bias=True, out='everywhere', how=How(style='rowwise', reshard=False))),),
        use=(Op(model=1, size=(4, 1), mode='selective', again='local', learns=False, index=6),
        Op(what='change', index=5, how='copy'), Op(what='log'), Op(what='backward', last=True,
        retain=True, index=6), Op(size=(3, 4), mode='selective', learns=False, index=5),
        Op(what='backward', last=True)))
    """,
    # Its stream was taken to be what a PrepareModuleInput beside it makes of it.
    "a norm beside a prepared module": """
        Program(grid=(3, 2), models=(Model(stream='tokens', row_dim=1, apply='blocks',
        embed=Embed(positions='stock_rowwise'), blocks=(Mlp(bias=False,
        norm=Norm(style='replicate', out='features'), prepare=True, after='tokens', conv=True,
        fused=True, beta='declared', mix='declared', up=How(style='replicate',
        dataflow='weight_stationary', reshard=True, regather=True, local=False),
        down=How(algorithm='pipelined', dataflow='own', reshard=False)),), head=Head(features=6,
        out='everywhere', how=How(algorithm='pipelined', regather=True))),), use=(Op(model=1,
        size=(3, 2), mode='raise', skip=(1,), loss='full', index=4), Op(what='save', model=1),
        Op(what='change', index=11, how='foreach'), Op(what='hold'), Op(model=1, size=(3, 5),
        again='local', index=6), Op(what='backward', last=True)), fsdp='reshard')
    """,
    # A DTensor on both axes was refused for how it was placed on the one that has one rank.
    "one token on both axes of which one has one rank": """
        Program(grid=(4, 1), models=(Model(stream='tokens', axes='both',
        blocks=(Mlp(between='whole', after='tokens', fused=True, up=How(style='replicate',
        local=False), down=How(style='local')),)),), use=(Op(size=(5, 1), mode='inference',
        twice=(0,)),))
    """,
    # The next style took a twin of what a PrepareModuleOutput gathers, past the hook by which FSDP2
    # gathers the parameters of the block that handed it out.
    "a prepared output under FSDP2": """
        Program(grid=(4, 1), models=(Model(axes='both', embed=Embed(), blocks=(Mlp(residual=False,
        after='tokens'),), head=Head()),), use=(Op(size=(3, 1)), Op('backward')), fsdp='reshard')
    """,
    # Keys of one head were placed otherwise than queries, on axes of one rank each.
    "dropout of attention weights on a mesh of one rank": """
        Program(models=(Model(axes='both', blocks=(Attention(kv_heads=1, plan='dtensor',
        dropout=True),)),), use=(Op(),))
    """,
    # Values of the encoder's told the tokens of what they make of the decoder's queries.
    "cross attention of cross attention": """
        Program(grid=(1, 4), models=(Model(stream='tokens', embed=Embed(),
        blocks=(Attention(residual=False, cross=True),), head=Head(features=2, out='tokens',
        how=How(style='rowwise'))),), use=(Op(size=(5, 5), twice=(0,)),))
    """,
    # Heads that a norm had handed out, in dim 2 of four, were taken for whole: all columns dropped
    # the same attention weights.
    "dropout of attention weights of normed heads": """
        Program(grid=(1, 2), models=(Model(blocks=(Attention(heads=4, kv_heads=2, plan='local',
        qk_norm='declared', dropout=True),)),), use=(Op(size=(4, 4)),))
    """,
    # DTensor gives a rank without samples new zeros for its part of a gradient, which depend on
    # nothing of backward: the sums that follow came into that rank's graph of forward.
    "a mean of each sample in a compiled block, where a row has no samples": """
        Program(grid=(2, 1), models=(Model(stream='tokens', local=False,
        blocks=(Mlp(pooled='mean'),)),), use=(Op(size=(2, 4)), Op(size=(1, 4)), Op('backward')),
        compiled=True)
    """,
    # frozenset[str]() is no call that Dynamo knows: the block ran in parts, and ranks waited for
    # each other in the graphs of these.
    "a block with Local2D in parts, where a row has no samples": """
        Program(grid=(2, 3), models=(Model(hidden=5, stream='tokens', local=False,
        blocks=(Mlp(inner=5, gate=True, conv=True, fused=True, beta='local',
        scale='replicate', keyword=True, pooled='mean', dropout='unnamed',
        up=How(style='stock_colwise', algorithm='bmr', reshard=True),
        down=How(style='stock_rowwise', dataflow='own', reshard=True)),
        Attention(heads=1, kv_heads=1, head_dim=3, qk_norm='declared',
        algorithm='two_phase', conv=True, fused=True, up=How(style='stock_colwise',
        dataflow='weight_stationary', reshard=False, regather=True),
        down=How(style='rowwise', dataflow='weight_stationary', reshard=False,
        local=False))), head=Head(features=5, bias=True, out='tokens',
        how=How(algorithm='cannon', dataflow='own', local=False))), Model(hidden=6,
        stream='hidden', local=False, axes='tp_row', blocks=(Mlp(inner=4, gate=True,
        after='whole', conv=True, fused=True, scale='columns', keyword=True,
        up=How(algorithm='collective', reshard=False), down=How(style='block',
        algorithm='bmr', dataflow='own', reshard=False)), Mlp(inner=2, bias=False,
        after='tokens', scale='replicate', mix='unnamed', up=How(style='stock_colwise',
        algorithm='fused', dataflow='own', local=False), down=How(style='rowwise',
        algorithm='fused', dataflow='weight_stationary', reshard=False)), Mlp(inner=2,
        bias=False, residual=False, conv=True, beta='unnamed', scale='replicate',
        up=How(style='stock_colwise'), down=How(style='local', algorithm='pipelined',
        reshard=False, regather=True, local=False))), norm=Norm(style='local',
        out='features', bias=False, local=False), head=Head(features=2, out='tokens',
        how=How(style='stock_colwise', reshard=True)))), use=(Op(size=(1, 8), skip=(0,
        1), again='local', loss='full', index=4), Op(what='exchange', index=6),
        Op(model=1, size=(5, 1)), Op(what='zero', model=1, how='zeros'), Op(what='log',
        index=1), Op(what='thaw', index=4), Op(what='exchange', index=4),
        Op(what='thaw', index=3), Op(what='hook', index=3, how='local'),
        Op(what='deepcopy'), Op(what='backward', index=2, how='sum'), Op(size=(1, 8),
        skip=(1,), learns=False, index=3), Op(what='backward', last=True)),
        fsdp='reshard', compiled=True)
    """,
    # What a column without features made of a style's dropout, in the block before, was refused as
    # random numbers that ranks with other tokens have alike.
    "dropout before a column without features": """
        Program(grid=(2, 2), models=(Model(row_dim=1, blocks=(Mlp(inner=1, scale='replicate',
        dropout='declared'),)),), use=(Op(twice=(0,), loss='full'),))
    """,
}
"""Programs that were wrong, or hung, as they were printed, simplified or not."""
SLOW = "grid=(3", "grid=(2, 3", "compiled=True"


@pytest.mark.parametrize(
    "name",
    [deep(name) if any(one in FOUND[name] for one in SLOW) else name for name in FOUND],
)
def test_programs_that_were_wrong(name: str, worlds: Worlds) -> None:
    check(eval(" ".join(FOUND[name].split()), vars(data)), worlds)
