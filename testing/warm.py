"""What the fork server of `ranks.py` has done before it forks a rank: imports, plugins too, and one training step.

Compiled and float8 jobs import the compiler, 600 modules that take a rank 1.2 s: it is here already.

The step runs under a fake process group so that everything torch imports or builds at first use is there already. Its
world has a size no test has: what DTensor remembers about this mesh is then never taken for a test's mesh.

The 400,000 objects that are here by then are frozen: each collection of a rank that went through them took 0.2 s.
"""

import contextlib
import faulthandler  # noqa: F401
import gc
import tempfile  # noqa: F401
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.checkpoint
import torch.distributed.checkpoint.state_dict
import torch.distributed.pipelining
import torchdata.stateful_dataloader  # noqa: F401
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from titan.contracts.plugin import registry
from titan.training import trainer  # noqa: F401

with contextlib.suppress(ImportError):  # ranks import the module of their test, and so pytest, where it is installed
    import pytest  # noqa: F401

WORLD_SIZE = 62


def _step() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU())
    mesh = init_device_mesh("cpu", (WORLD_SIZE // 2, 2), mesh_dim_names=("outer", "inner"))
    parallelize_module(model, mesh["inner"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["outer"])
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4))
    # No backward: where PyTorch is built for an accelerator its threads would outlive it, and a fork of them is broken.
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()


registry.load_plugins()
torch.set_num_threads(1)
dist.init_process_group("fake", rank=0, world_size=WORLD_SIZE)
# Whoever asks CUDA for its devices can use none in a process that it forks. Modes of fake tensors ask by the second.
with (
    patch.object(torch.cuda, "is_available", return_value=False),
    patch.object(torch._C, "_ensureCUDADeviceGuardSet", create=True),
):
    # That imports the compiler. A call would count the devices, and remember for each rank that there is no Triton.
    torch.compile(torch.neg, backend="inductor")
    _step()
dist.destroy_process_group()
gc.collect()
gc.freeze()
