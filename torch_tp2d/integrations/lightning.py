"""A grid of tensor-parallel ranks for PyTorch Lightning's Trainer."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.device_mesh import init_device_mesh

from ..mesh.layouts import TP_COL, TP_ROW

__all__ = ["GridStrategy"]


class GridStrategy(ModelParallelStrategy):
    """Lightning's ModelParallelStrategy, with ``tp_row`` and ``tp_col`` for its one TP axis.

    In a module's ``configure_model``, ``device_mesh`` has three axes, ``data_parallel``, ``tp_row``
    and ``tp_col``; apply the plan there, and FSDP2 after it if wanted. All ranks of a grid get the
    same batch. Checkpoints are Lightning's: one that was saved on a grid can be resumed on any
    other grid, on a one-dimensional mesh, and on one device.

    Args:
        rows: size of ``tp_row``.
        columns: size of ``tp_col``.
        data_parallel_size: number of grids, each of which gets its own batches.
        kwargs: those of ModelParallelStrategy: ``save_distributed_checkpoint``, ``timeout``, and
            ``process_group_backend``, for which ``"gloo_in_order"`` is the safer one on CPUs
            (:mod:`torch_tp2d.comm.groups`).

    Raises:
        ValueError: for sizes that are not positive; and when training starts, if the number of
            devices is not ``data_parallel_size * rows * columns``.

    Example::

        >>> class Model(LightningModule):
        ...     def configure_model(self):
        ...         grid = self.device_mesh["tp_row", "tp_col"]
        ...         torch_tp2d.parallelize_module(self.model, grid, plan)
        ...         if self.device_mesh["data_parallel"].size() > 1:
        ...             fully_shard(self.model, mesh=self.device_mesh["data_parallel"])
        >>> Trainer(devices=4, strategy=GridStrategy(2, 2)).fit(Model(), data)
    """

    def __init__(
        self, rows: int, columns: int, *, data_parallel_size: int = 1, **kwargs: Any
    ) -> None:
        self.mesh_shape = data_parallel_size, rows, columns
        if min(self.mesh_shape) < 1:
            raise ValueError(f"the sizes of a grid are 1 or more, not {self._sizes()}")
        super().__init__(data_parallel_size, rows * columns, **kwargs)

    def _sizes(self) -> str:
        return "data_parallel_size={}, rows={}, columns={}".format(*self.mesh_shape)

    def setup_environment(self) -> None:
        ranks = self.num_processes * self.num_nodes
        data, rows, columns = self.mesh_shape
        if data * rows * columns != ranks:
            raise ValueError(
                f"{self._sizes()} make {data * rows * columns} ranks, but the Trainer has {ranks} "
                f"(devices={self.num_processes}, num_nodes={self.num_nodes}): change one of them"
            )
        super().setup_environment()
        assert self.lightning_module is not None
        self._device_mesh = init_device_mesh(
            self.root_device.type,
            self.mesh_shape,
            mesh_dim_names=("data_parallel", TP_ROW, TP_COL),
        )
        # LightningModule.device_mesh reads this attribute.
        self.lightning_module._device_mesh = self._device_mesh
