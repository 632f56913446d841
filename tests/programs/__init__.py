"""Random programs: models, plans and uses as plain data, run on a grid beside one device.

Each file knows those before it: ``data`` (what a program is), ``draw`` (hypothesis draws them;
``shrink`` makes them smaller), ``models`` (a program's model, for one device), ``plans`` (its plan
for a grid), ``beside`` (one device and the grid: models, inputs and what differs), ``use`` (runs a
program on one rank of the grid) and ``ranks`` (processes that run one program after the other).
"""

from .data import Attention, Embed, Head, How, Mlp, Model, Norm, Op, Program

__all__ = ["Attention", "Embed", "Head", "How", "Mlp", "Model", "Norm", "Op", "Program"]
