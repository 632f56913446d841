"""The matmul styles."""

from __future__ import annotations

from ...mesh import layouts
from .matmul import MatmulStyle

__all__ = ["Block2DParallel", "Colwise2D", "Rowwise2D"]


class Colwise2D(MatmulStyle):
    """Shard the outputs of a Linear over ``tp_col`` and its inputs over ``tp_row``.

    The 2-D namesake of :class:`torch.distributed.tensor.parallel.ColwiseParallel`, which it can
    replace in a plan. For ``X[B, S, K]`` and ``W[N, K]`` on an R x C grid:

    ===============  ==============================  ==============================
    tensor           layout                          local shape
    ===============  ==============================  ==============================
    input (wanted)   ``(Shard(0), Replicate())``     ``[B/R, S, K]``
    weight           ``(Shard(1), Shard(0))``        ``[N/C, K/R]``
    bias             ``(Replicate(), Shard(0))``     ``[N/C]``
    output           ``(Shard(0), Shard(-1))``       ``[B/R, S, N/C]``
    ===============  ==============================  ==============================

    Forward gathers the input along ``tp_col``, unless it is replicated there, and the weight along
    ``tp_row``. On an ``nn.Embedding`` ``W[V, H]``, ``tp_col`` splits the hidden dim, ``tp_row`` the
    vocabulary, and the ids are replicated on every rank.

    On an ``nn.Conv2d`` that embeds patches, its kernel equal to its stride, the images
    ``[B, C, H, W]`` are replicated on every rank too, and each row embeds its own. The output is
    ``[B, N, H / height, W / width]``, in ``(Shard(0), Shard(1))`` by default. ``tp_col`` splits the
    weight's outputs, and ``tp_row`` the longest of its other dims. A row without images gets one of
    zeros, which :class:`Local2D` drops.

    With ``dataflow="weight_stationary"`` the weight is placed as above and never moves, and neither
    does its gradient. This is for few tokens, as in decoding:

    ===============  ==============================  ==============================
    tensor           layout                          local shape
    ===============  ==============================  ==============================
    input (wanted)   ``(Shard(-1), Replicate())``    ``[B, S, K/R]``
    result           ``(Partial(), Shard(-1))``      ``[B, S, N/C]``
    ===============  ==============================  ==============================

    The input is redistributed to that layout from ``input_layouts``, and the result to
    ``output_layouts``; both mean what they do for the other dataflow, with the same defaults. Least
    data moves for an input in the transposed layout, ``(Shard(-1), Shard(1))``, which is gathered
    along ``tp_col``, or with tokens replicated there, ``(Shard(-1), Replicate())``, which is not
    gathered at all; and for an output that is only summed along ``tp_row``:
    ``(Shard(0), Shard(-1))`` or ``(Replicate(), Shard(-1))``. ``tutorials/decode.py`` has a full
    model in these layouts.

    Keyword Args:
        input_layouts: layout of a local input tensor, by default ``Replicate()``. A single
            Placement is the one on ``tp_col``, and ``tp_row`` stays ``Shard(row_dim)``; a pair is
            ``(tp_row, tp_col)``. A DTensor knows its own layout. For ids the default is
            ``Replicate()`` on both axes.
        output_layouts: layout of the output, by default ``Shard(-1)``, with the same forms. An
            embedding of one-dim ids (positions) has no batch, so its output is replicated along
            ``tp_row``.
        use_local_output: hand on a local tensor (default) or a DTensor of the global shape.
        row_dim: the token dim that ``tp_row`` splits: 0 the batch, 1 the sequence.
        dataflow: the style's own (above), ``"weight_stationary"``, or ``"auto"``, which chooses at
            each call the one that takes less time for the number of tokens, by the arithmetic of
            :mod:`torch_tp2d.planner`. The rates of links and ranks are measured on gloo when a
            mesh gets its first style (:func:`torch_tp2d.planner.assume` sets others). ``"auto"`` is
            the style's own where rates or tokens are not known, under ``torch.compile``, and with
            an algorithm named below, which moves the weight. An embedding's weight never moves,
            whatever the dataflow.
        algorithm: ``"auto"``, ``"pipelined"``, ``"collective"``, ``"fused"``, ``"summa"``,
            ``"bmr"`` or ``"cannon"``; the last two need a square grid, and ``"fused"`` a device on
            which torch sends and multiplies in one operator: GPUs. ``"auto"`` is ``"pipelined"``,
            except where links are measured (gloo) and transfers take less time than rounds cost:
            there it is ``"collective"``. A stationary weight takes ``"auto"`` and ``"collective"``
            only.
        reshard_after_forward: free the gathered weight after forward and gather it a second time in
            backward (True), or keep it (False), for 1/C of the weight more memory and a third less
            weight traffic. None (default) frees it on NCCL, as FSDP2 does; on gloo only where it is
            larger than the input that is kept beside it, in a model whose embedding is on the mesh
            too. Only ``"pipelined"``, ``"fused"`` and ``"collective"`` gather a weight.
        regather_input: for backward, gather an input that ``tp_col`` splits by tokens a second time
            instead of keeping it: 1/N of it is kept, not 1/R, and it travels three times instead of
            twice. It needs ``"pipelined"`` or ``"fused"``, and eager mode; q, k and v use one such
            gather.
        reduce_dtype: the dtype in which the gradients of weight and bias are summed over
            ``tp_row``, as in FSDP2's ``MixedPrecisionPolicy``: ``torch.float32`` for products in
            bf16, at twice the bytes of these sums. None (default) is the dtype of the products. It
            needs ``"pipelined"``, ``"fused"`` or ``"collective"``; micro-batches under
            :class:`~torch_tp2d.no_sync` are added up in it too.
        grad_layouts: layout of the gradient that comes back for a local output, if that is not the
            output's own. The default is right for a head that is replicated everywhere (every rank
            computes the same loss: Replicate) and for positions (replicated along ``tp_row`` and
            added to different tokens in each row: Partial there). What is whole along ``tp_col``
            and meets split features or heads (a gate of each token, keys that all heads share) is
            Partial along ``tp_col``; an error asks for it.
        parts: how many projections of one size are fused in the weight, 3 for the queries, keys and
            values of GPT-2's ``c_attn``; or their sizes, such as ``(64, 16, 16)`` with four times
            as many query heads as key heads. Each has to divide by ``tp_col``. The weight is
            sharded as any other (and so saved as one matrix), but the output is this rank's shard
            of each projection, side by side. For that, the ranks along ``tp_col`` exchange columns
            of their shards before the product, at most ``N*K/(R*C)`` elements, and of the gradient
            after it. Weight stationary, they exchange the output's features instead. None (default)
            means 1, but :func:`torch_tp2d.parallelize_module` refuses it if the Rowwise2D beside
            this module takes so many fewer features than this one gives that several must be
            fused. An explicit 1 says that there is one projection, or that its features are grouped
            so that a plain shard is right (queries, keys and values of a head side by side).

    Raises:
        TypeError: when applied to another kind of module, or to integer weights.
        ValueError: for an unknown option, a mesh that is not ``("tp_row", "tp_col")``, a square
            algorithm on an oblong grid, ``"fused"`` where torch has no operators, an algorithm
            that moves a stationary weight, or parameters that are on another mesh already.

    Source: TP2D (doi 10.11992/tis.202411023), section 2. By our count each device receives
    ``(C-1)/C * M/R * K + (R-1)/R * K*N/C`` elements in forward and, weight stationary between
    transposed and feature layout, ``(C-1)/C * M * K/R + (R-1)/R * M * N/C``
    (:func:`torch_tp2d.planner.cost.linear_traffic`).

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
    parallelism), ``Shard(-1)`` over the hidden dim. On an ``nn.Embedding`` ``W[V, H]``, ``tp_col``
    splits the vocabulary and ``tp_row`` the hidden dim, the layout of a tied :class:`Colwise2D`
    head; the ids are replicated on every rank.

    With ``dataflow="weight_stationary"`` the weight is placed as above and never moves, and neither
    does its gradient; the bias is placed as above too, and its gradient is summed along ``tp_row``:

    ===============  ==============================  ==============================
    tensor           layout                          local shape
    ===============  ==============================  ==============================
    input (wanted)   ``(Replicate(), Shard(-1))``    ``[B, S, K/C]``
    result           ``(Shard(-1), Partial())``      ``[B, S, N/R]``
    ===============  ==============================  ==============================

    An input in the feature layout is gathered along ``tp_row``; an output is summed along
    ``tp_col`` alone if ``output_layouts`` is the transposed ``(Shard(-1), Shard(1))`` or, with
    tokens replicated along ``tp_col``, ``(Shard(-1), Replicate())``.

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

    This is for stacks in which the hidden dim stays split over ``tp_col``, with :class:`Norm2D`
    between the Linears, as in the paper's Algorithm 1. For ``X[B, S, K]`` and ``W[N, K]``:

    ===============  ==============================  ==============================
    tensor           layout                          local shape
    ===============  ==============================  ==============================
    input (wanted)   ``(Shard(0), Shard(-1))``       ``[B/R, S, K/C]``
    weight           ``(Shard(1), Shard(0))``        ``[N/C, K/R]``
    bias             ``(Replicate(), Shard(0))``     ``[N/C]``
    output           ``(Shard(0), Shard(-1))``       ``[B/R, S, N/C]``
    ===============  ==============================  ==============================

    The keyword arguments and errors are :class:`Colwise2D`'s; it does not take an embedding.
    Weight stationary, ``X`` is redistributed to ``(Shard(-1), Replicate())``, and the result, which
    is partial along ``tp_row``, to the feature layout, as in Colwise2D.

    Source: TP2D (doi 10.11992/tis.202411023), Algorithm 1 with ``algorithm="bmr"``.

    Example::

        >>> plan = {"fc1": Block2DParallel(algorithm="bmr"), "fc2": Block2DParallel()}
        >>> parallelize_module(mlp, mesh["tp_row", "tp_col"], plan)
    """

    rule = layouts.BLOCK
    embeddings = False
