"""The order of samples: complete epochs, a function of seed and step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adatape.data.batch import Shard
from adatape.data.sampler import Order


def ids(order: Order, steps: int, first: int = 0) -> np.ndarray:
    return np.concatenate([order.slots(step, 0, order.batch).ids for step in range(first, first + steps)])


@given(st.integers(1, 60), st.integers(1, 25), st.integers(0, 3))
def test_each_epoch_is_a_permutation_and_no_batch_leaves_a_gap(samples: int, batch: int, seed: int) -> None:
    seen = ids(Order(samples, batch, seed), 3 * -(-samples // batch))
    for epoch in range(len(seen) // samples):
        assert sorted(seen[epoch * samples : (epoch + 1) * samples]) == list(range(samples))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    epochs = [tuple(ids(Order(50, 50, seed), 1, epoch)) for seed in range(3) for epoch in range(3)]
    assert len(set(epochs)) == 9
    assert epochs[0] == tuple(ids(Order(50, 50, 0), 1))


def test_the_order_does_not_depend_on_the_batch() -> None:
    assert np.array_equal(ids(Order(30, 6, 1), 10), ids(Order(30, 20, 1), 3))


@given(st.integers(1, 40), st.integers(1, 24), st.integers(1, 6), st.integers(0, 30))
def test_parts_of_processes_one_after_the_other_are_the_global_batch(
    samples: int, part: int, world: int, step: int
) -> None:
    order = Order(samples, part * world, seed=2)
    whole = order.slots(step, 0, order.batch)
    parts = [order.slots(step, *Shard(rank, world).bounds(order.batch)) for rank in range(world)]
    assert np.array_equal(np.concatenate([each.ids for each in parts]), whole.ids)
    assert np.array_equal(np.concatenate([each.position for each in parts]), whole.position)


@given(st.integers(1, 24), st.integers(1, 6), st.integers(0, 30))
def test_the_neighbour_beyond_a_part_is_the_first_of_the_next(part: int, world: int, step: int) -> None:
    order = Order(40, part * world, seed=2)
    whole = order.slots(step, 0, order.batch)
    for rank in range(world):
        start, stop = Shard(rank, world).bounds(order.batch)
        beyond = order.slots(step, start, stop + 1)
        assert (beyond.ids[-1], beyond.position[-1]) == (
            whole.ids[stop % order.batch],
            whole.position[stop % order.batch],
        )


@given(st.integers(1, 40), st.integers(1, 24), st.integers(0, 20))
def test_no_position_of_a_run_occurs_twice(samples: int, batch: int, step: int) -> None:
    order = Order(samples, batch, 0)
    positions = np.concatenate([order.slots(each, 0, batch).position for each in range(step, step + 3)])
    assert np.array_equal(positions, np.arange(step * batch, (step + 3) * batch))


@given(st.integers(2, 24), st.integers(1, 6), st.integers(0, 20))
def test_copies_of_an_image_lie_as_far_apart_as_they_can(batch: int, repeats: int, step: int) -> None:
    order = Order(200, batch, seed=3, repeats=min(repeats, batch))
    seen = order.slots(step, 0, batch).ids
    assert len(set(seen)) == order.distinct
    for image in set(seen):
        places = np.flatnonzero(seen == image)
        assert len(places) in (batch // order.distinct, -(-batch // order.distinct))
        assert (np.diff(places) == order.distinct).all()


def test_repeats_leave_no_image_of_an_epoch_out() -> None:
    order = Order(30, 12, seed=0, repeats=3)
    seen = [order.slots(step, 0, order.distinct).ids for step in range(15)]
    assert sorted(np.concatenate(seen)[:30]) == list(range(30))
    assert order.epoch(15) == 2.0


@pytest.mark.parametrize(
    ("given_to", "message"),
    [
        ({"samples": 0, "batch": 4}, "samples is 0 and batch 4; both must be at least 1"),
        ({"samples": 9, "batch": 4, "repeats": 5}, "repeats is 5; it must be between 1 and the batch of 4"),
    ],
)
def test_an_impossible_order_says_why(given_to: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Order(seed=0, **given_to)
    with pytest.raises(ValueError, match="batch is 10; it must be a multiple of the 4 processes"):
        Shard(0, 4).bounds(10)
