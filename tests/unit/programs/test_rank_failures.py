"""Errors that this machine cannot bring about; the texts are written as PyTorch documents them, not as seen."""

from __future__ import annotations

import pytest
import torch

from tasks.programs.rank_failures import is_lost_peer, lost_peer, unexpected

JOB = {"config": {"batch_size": 64}, "recipe": "/nowhere/recipe.py:User"}

GPU_MEMORY = {
    "the allocator's": torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB of which 1.10 GiB is "
        "free. Of the allocated memory 76.20 GiB is allocated by PyTorch, and 512.00 MiB is reserved by PyTorch."
    ),
    "the driver's": RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
}


@pytest.mark.parametrize("error", GPU_MEMORY.values(), ids=GPU_MEMORY)
def test_a_full_gpu_is_told_with_the_peak_and_the_batch_size_to_try(error):
    failure = unexpected(error, JOB, 3)
    assert failure.message.startswith("rank 3 ran out of memory; its peak was ")
    assert str(error).splitlines()[0] in failure.message
    assert failure.hint is not None
    assert failure.hint.startswith("try train.batch_size 32 (it is 64), or ")
    assert not is_lost_peer(error)


LOST = {
    "NCCL's watchdog": "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE)",
    "NCCL's peer": "NCCL error: remote process exited or there was a network error",
    "gloo's": "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:5301",
}


@pytest.mark.parametrize("text", LOST.values(), ids=LOST)
def test_a_peer_that_is_missed_is_no_failure_of_ones_own(text):
    error = RuntimeError(text)
    assert is_lost_peer(error)
    assert "another rank could not be reached" in lost_peer(error, None, JOB).message
