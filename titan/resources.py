"""What a process takes of its machine: file descriptors and GPU memory.

Each is a default: where the user or a scheduler has chosen, that choice stands.
"""

import os
import resource
from contextlib import suppress

import torch

DESCRIPTORS = 1 << 20
"""Most that a process asks for: some systems have no hard limit at all."""

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Environment variables with options of PyTorch's allocator on GPUs. The first one is the name since PyTorch 2.9."""


def raise_descriptor_limit() -> None:
    """Raise the limit of open files of this process and its children to the hard limit, at most `DESCRIPTORS`.

    A socket is an open file. The process that serves the store has a socket per rank of the run, and rank 0 of a gather
    has one per rank; the usual limit is 1,024. Silent where the system refuses.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def let_segments_expand() -> None:
    """Let PyTorch's allocator extend a segment of GPU memory in place, so that freed memory is left in fewer pieces.

    To be called before the first use of CUDA, which is when the allocator reads its options. Does nothing where the
    user has set any of `ALLOCATOR`, and on AMD GPUs: of the builds of PyTorch 2.11 to 2.13 only some for ROCm 7 support
    it, and it can hang (pytorch issue 192259).
    """
    if torch.version.hip is None and not any(name in os.environ for name in ALLOCATOR):
        os.environ[ALLOCATOR[0]] = "expandable_segments:True"
