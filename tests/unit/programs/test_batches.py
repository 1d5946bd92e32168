"""Whatever the number of ranks: each sample once per epoch, in the same steps."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tasks.programs.batches import order_of, shares

lengths = st.integers(1, 60)
sizes = st.integers(1, 20)
worlds = st.integers(1, 6)


@given(lengths, sizes, worlds, st.integers(0, 1000))
def test_each_sample_counts_exactly_once_per_epoch(length, batch_size, world_size, seed):
    order = order_of(length, seed=seed, epoch=1)
    plans = [shares(order, batch_size=batch_size, rank=rank, world_size=world_size) for rank in range(world_size)]
    counted = [index for plan in plans for share in plan for index in share.indices[: share.real]]
    assert sorted(counted) == list(range(length))


@given(lengths, sizes, worlds)
def test_ranks_step_together_with_equally_many_rows_and_agree_on_the_step(length, batch_size, world_size):
    order = range(length)
    plans = [shares(order, batch_size=batch_size, rank=rank, world_size=world_size) for rank in range(world_size)]
    for step, parts in enumerate(zip(*plans, strict=True)):
        assert len({len(part.indices) for part in parts}) == 1
        assert len(parts[0].indices) > 0
        rows = [index for part in parts for index in part.indices[: part.real]]
        assert rows == list(order)[step * batch_size : (step + 1) * batch_size]
        assert {part.total for part in parts} == {len(rows)}


def test_the_order_depends_on_seed_and_epoch_and_on_nothing_else():
    import torch

    torch.manual_seed(1)
    first = order_of(50, seed=0, epoch=1)
    torch.manual_seed(2)
    assert order_of(50, seed=0, epoch=1) == first
    assert order_of(50, seed=0, epoch=2) != first
    assert order_of(50, seed=1, epoch=1) != first
    assert sorted(first) == list(range(50))
