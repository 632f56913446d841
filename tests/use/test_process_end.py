"""How a process ends that has sent something on a grid."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch_tp2d

rank, store = int(sys.argv[1]), dist.FileStore(sys.argv[2], 2)
torch.set_num_threads(1)
dist.init_process_group("gloo_in_order", store=store, rank=rank, world_size=2)
mesh = dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("tp_row", "tp_col"))
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
plan = {"0": torch_tp2d.Colwise2D(), "1": torch_tp2d.Rowwise2D()}
torch_tp2d.parallelize_module(model, mesh, plan)
workers = 0
for task in Path("/proc/self/task").iterdir():
    if (task / "comm").read_text().strip() == "pt_gloo_runloop":
        workers += 1
        os.sched_setscheduler(int(task.name), os.SCHED_IDLE, os.sched_param(0))
assert workers, "torch's workers are called otherwise: the test would test nothing"
model(torch.ones(1, 8, 64)).sum().backward()
dist.destroy_process_group()
"""


@pytest.mark.deep
@pytest.mark.skipif(sys.platform != "linux", reason="priorities of threads are Linux's")
def test_workers_let_go_of_their_tensors_first(tmp_path: Path) -> None:
    """One training run in fifty ended in "terminate called without an active exception".

    All of its work was done. A worker of gloo still had a tensor of the last transfer when Python
    ended, since ``destroy_process_group()`` does not end the workers of a mesh that DTensor's
    caches keep. Here workers only run while nothing else does on the one core of both processes,
    so that without a mend most runs end so.
    """
    core = min(os.sched_getaffinity(0))
    for attempt in range(3):
        command = [sys.executable, "-c", PROGRAM]
        store = str(tmp_path / f"store{attempt}")
        ranks = [
            subprocess.Popen(
                [*command, str(rank), store],
                stderr=subprocess.PIPE,
                text=True,
                preexec_fn=lambda: os.sched_setaffinity(0, {core}),
            )
            for rank in range(2)
        ]
        for rank in ranks:
            _, said = rank.communicate(timeout=240)
            assert rank.returncode != -signal.SIGABRT, said
            assert rank.returncode == 0, said
