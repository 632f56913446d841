"""The matmul styles."""

from __future__ import annotations

from ...mesh import layouts
from .matmul import MatmulStyle

__all__ = ["Block2DParallel", "Colwise2D", "Rowwise2D"]


class Colwise2D(MatmulStyle):
    """Shard the outputs of a Linear over ``tp_col`` and its inputs over ``tp_row``.

    The 2-D namesake of :class:`torch.distributed.tensor.parallel.ColwiseParallel`: rename it and
    the plan goes on working. For ``X[B, S, K]`` and ``W[N, K]`` on an R x C grid:

    ===============  ==============================  ==============================
    tensor           layout                          local shape
    ===============  ==============================  ==============================
    input (wanted)   ``(Shard(0), Replicate())``     ``[B/R, S, K]``
    weight           ``(Shard(1), Shard(0))``        ``[N/C, K/R]``
    bias             ``(Replicate(), Shard(0))``     ``[N/C]``
    output           ``(Shard(0), Shard(-1))``       ``[B/R, S, N/C]``
    ===============  ==============================  ==============================

    Forward gathers the input along ``tp_col``, where it is not whole, and the weight along
    ``tp_row``. On an ``nn.Embedding`` ``W[V, H]`` the hidden dim lies over ``tp_col``, the
    vocabulary over ``tp_row``, and the ids are whole on every rank.

    On an ``nn.Conv2d`` that embeds patches, its kernel equal to its stride, the images
    ``[B, C, H, W]`` are whole on every rank too, and a row embeds its own. The output is
    ``[B, N, H / height, W / width]``, in ``(Shard(0), Shard(1))`` by default. The weight's outputs
    lie over ``tp_col`` and the longest of its other dims over ``tp_row``. A row without images
    gets one of zeros, which :class:`Local2D` drops again.

    With ``dataflow="weight_stationary"`` the weight lies as above and never moves, and neither
    does its gradient. For few tokens, as in decoding:

    ===============  ==============================  ==============================
    tensor           layout                          local shape
    ===============  ==============================  ==============================
    input (wanted)   ``(Shard(-1), Replicate())``    ``[B, S, K/R]``
    result           ``(Partial(), Shard(-1))``      ``[B, S, N/C]``
    ===============  ==============================  ==============================

    The input is brought there from ``input_layouts`` and the result to ``output_layouts``, which
    mean what they always do and have the same defaults. What moves least is an input in the
    transposed layout, ``(Shard(-1), Shard(1))``, gathered along ``tp_col``, or of whole tokens,
    ``(Shard(-1), Replicate())``, gathered by nobody; and an output summed along ``tp_row``:
    ``(Shard(0), Shard(-1))`` or ``(Replicate(), Shard(-1))``. ``tutorials/decode.py`` is a whole
    model laid out so.

    Keyword Args:
        input_layouts: layout of a local input tensor, by default ``Replicate()``: a single
            Placement is the one on ``tp_col``, ``tp_row`` stays ``Shard(row_dim)``; a pair is
            ``(tp_row, tp_col)``. A DTensor knows its own. Ids: ``Replicate()`` on both axes.
        output_layouts: layout of the output, by default ``Shard(-1)``, read likewise. An
            embedding of one-dim ids (positions) has no batch, so its output is replicated along
            ``tp_row``.
        use_local_output: hand on a local tensor (default) or a DTensor of the global shape.
        row_dim: the token dim that ``tp_row`` splits: 0 the batch, 1 the sequence.
        dataflow: the style's own (above), ``"weight_stationary"``, or ``"auto"``: whichever takes
            less time for as many tokens, each time, by the arithmetic of
            :mod:`torch_tp2d.planner` and the rates of links and ranks, measured on gloo when a
            mesh gets its first style (:func:`torch_tp2d.planner.assume` gives others). Where
            rates or tokens are not known, under ``torch.compile`` and for an algorithm named
            below, which moves the weight, it is the style's own. An embedding's weight never
            moves, whatever the dataflow.
        algorithm: ``"auto"``, ``"pipelined"``, ``"collective"``, ``"fused"``, ``"summa"``,
            ``"bmr"`` or ``"cannon"``; the last two need a square grid, and ``"fused"`` a device on
            which torch sends and multiplies in one operator: GPUs. ``"auto"`` is ``"pipelined"``,
            but for ``"collective"`` where links are measured (gloo) and transfers take less time
            than rounds cost. A weight that stays takes ``"auto"`` and ``"collective"`` only.
        reshard_after_forward: free the gathered weight after forward and gather it again in
            backward (True), or keep it (False): 1/C of the weight more memory, a third less
            weight traffic. None (default) gathers it again on NCCL, as FSDP2 does; on gloo only
            where it is larger than the input that is kept beside it, in a model whose embedding is
            on the mesh too. Only ``"pipelined"``, ``"fused"`` and ``"collective"`` gather a weight.
        regather_input: gather an input that is split by tokens over ``tp_col`` again for
            backward instead of keeping it: 1/N of it is kept, not 1/R, and it travels three times
            instead of twice. With ``"pipelined"`` and ``"fused"`` in eager; q, k and v share it.
        reduce_dtype: in which the gradients of weight and bias are summed over ``tp_row``, as in
            FSDP2's ``MixedPrecisionPolicy``: ``torch.float32`` for products in bf16, at twice the
            bytes of these sums. None (default) is the dtype of the products. With
            ``"pipelined"``, ``"fused"`` and ``"collective"``; micro-batches under
            :class:`~torch_tp2d.no_sync` add up in it too.
        grad_layouts: layout of the gradient that comes back for a local output, where that is
            not the output's own. The default is right for a head that is whole everywhere
            (every rank computes the same loss: Replicate) and for positions (replicated along
            ``tp_row``, added to other tokens in each row: Partial there).
        parts: how many projections of one size a fused weight holds side by side, 3 for the
            queries, keys and values of GPT-2's ``c_attn``; or their sizes, as ``(64, 16, 16)`` of
            four times as many query as key heads. Each has to divide by ``tp_col``. The weight is
            sharded as any other (and so saved as one matrix), but the output is this rank's share
            of each projection, side by side. For that the ranks along ``tp_col`` exchange columns
            of their shards before the product, at most ``N*K/(R*C)`` elements, and of the gradient
            after. Weight stationary, they exchange the output's features instead. None (default)
            is 1, and :func:`torch_tp2d.parallelize_module` refuses it where the Rowwise2D beside
            takes so much less than this module gives that there must be several; 1 says that there
            is one, or that what belongs together stands side by side (queries, keys and values by
            heads).

    Raises:
        TypeError: when applied to another kind of module, or to integer weights.
        ValueError: for an unknown option, a mesh that is not ``("tp_row", "tp_col")``, a square
            algorithm on an oblong grid, ``"fused"`` where torch has no operators, an algorithm
            that moves a weight that is to stay, or parameters that are on another mesh already.

    Source: TP2D (doi 10.11992/tis.202411023), section 2; our count of what moves is
    ``(C-1)/C * M/R * K + (R-1)/R * K*N/C`` elements received per device in forward, and
    ``(C-1)/C * M * K/R + (R-1)/R * M * N/C`` weight stationary between transposed and feature
    layout (:func:`torch_tp2d.planner.cost.linear_traffic`).

    Example::

        >>> mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp_row", "tp_col"))
        >>> plan = {"w1": Colwise2D(), "w2": Rowwise2D()}
        >>> parallelize_module(mlp, mesh, plan)
        >>> mlp(x_of_this_row)     # [B/2, S, H] -> [B/2, S, H]
    """

    rule = layouts.COLWISE
    patches = True


class Rowwise2D(MatmulStyle):
    """Shard the inputs of a Linear over ``tp_col`` and its outputs over ``tp_row``.

    The 2-D namesake of :class:`torch.distributed.tensor.parallel.RowwiseParallel`. For
    ``X[B, S, K]`` and ``W[N, K]`` on an R x C grid:

    ===============  ==============================  ==============================
    tensor           layout                          local shape
    ===============  ==============================  ==============================
    input (wanted)   ``(Shard(0), Shard(-1))``       ``[B/R, S, K/C]``
    weight           ``(Shard(0), Shard(1))``        ``[N/R, K/C]``
    bias             ``(Replicate(), Shard(0))``     ``[N/C]``
    output           ``(Shard(0), Replicate())``     ``[B/R, S, N]``
    ===============  ==============================  ==============================

    Forward gathers the weight along ``tp_row`` and reduces the output along ``tp_col``:
    ``output_layouts=Shard(1)`` scatters it over the sequence (the residual stream of sequence
    parallelism), ``Shard(-1)`` over the hidden dim. On an ``nn.Embedding`` ``W[V, H]`` the
    vocabulary lies over ``tp_col`` and the hidden dim over ``tp_row``, the layout of a tied
    :class:`Colwise2D` head; the ids are whole on every rank.

    With ``dataflow="weight_stationary"`` the weight lies as above and never moves, and neither
    does its gradient; the bias lies as above too, and its gradient is summed along ``tp_row``:

    ===============  ==============================  ==============================
    tensor           layout                          local shape
    ===============  ==============================  ==============================
    input (wanted)   ``(Replicate(), Shard(-1))``    ``[B, S, K/C]``
    result           ``(Shard(-1), Partial())``      ``[B, S, N/R]``
    ===============  ==============================  ==============================

    An input in the feature layout is gathered along ``tp_row``; an output is summed along
    ``tp_col`` alone if ``output_layouts`` is the transposed ``(Shard(-1), Shard(1))`` or, with
    whole tokens, ``(Shard(-1), Replicate())``.

    The keyword arguments and errors are :class:`Colwise2D`'s; ``input_layouts`` is ``Shard(-1)``
    and ``output_layouts`` ``Replicate()`` by default.

    Source: TP2D (doi 10.11992/tis.202411023), section 2; received per device in forward:
    ``(R-1)/R * K*N/C + (C-1)/C * M/R * N`` elements; weight stationary, from feature to
    transposed layout, ``(R-1)/R * M * K/C + (C-1)/C * M * N/R``.

    Example::

        >>> plan = {"tok_embeddings": Rowwise2D(output_layouts=Shard(1)),
        ...         "layers.*.feed_forward.w2": Rowwise2D(output_layouts=Shard(1))}
        >>> parallelize_module(model, mesh["tp_row", "tp_col"], plan)
    """

    rule = layouts.ROWWISE


class Block2DParallel(MatmulStyle):
    """Keep both the input and the output of a Linear in blocks: the feature layout.

    For stacks in which the hidden dim itself stays split over ``tp_col`` (with :class:`Norm2D`
    between), as in the paper's Algorithm 1. For ``X[B, S, K]`` and ``W[N, K]``:

    ===============  ==============================  ==============================
    tensor           layout                          local shape
    ===============  ==============================  ==============================
    input (wanted)   ``(Shard(0), Shard(-1))``       ``[B/R, S, K/C]``
    weight           ``(Shard(1), Shard(0))``        ``[N/C, K/R]``
    bias             ``(Replicate(), Shard(0))``     ``[N/C]``
    output           ``(Shard(0), Shard(-1))``       ``[B/R, S, N/C]``
    ===============  ==============================  ==============================

    The keyword arguments and errors are :class:`Colwise2D`'s; it does not take an embedding.
    Weight stationary, ``X`` is brought to ``(Shard(-1), Replicate())`` and the result, a sum along
    ``tp_row``, to the feature layout, as by Colwise2D.

    Source: TP2D (doi 10.11992/tis.202411023), Algorithm 1 with ``algorithm="bmr"``.

    Example::

        >>> plan = {"fc1": Block2DParallel(algorithm="bmr"), "fc2": Block2DParallel()}
        >>> parallelize_module(mlp, mesh["tp_row", "tp_col"], plan)
    """

    rule = layouts.BLOCK
    embeddings = False
