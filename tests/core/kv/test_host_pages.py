from __future__ import annotations

import numpy as np
import pytest

from pelton.core.kv.host_pages import HostPages, MoveCosts
from pelton.core.plan import NO_COPIES
from pelton.errors import IntegrityError

FREE = MoveCosts()


def test_costs_decide_per_request():
    """4 tokens to a page: the shorter request is computed again, the longer one is moved."""
    costs = MoveCosts(per_token=1.0, per_page=3.0, per_move=5.0)
    assert not costs.pays(4, 1)
    assert not costs.pays(8, 1)
    assert costs.pays(9, 1)
    assert not costs.pays(20, 5)
    assert costs.pays(24, 6)
    pages = HostPages(10, costs)
    assert pages.save(20, [0], [[1, 2, 3, 4, 5]]) is None
    assert pages.save(24, [0], [[1, 2, 3, 4, 5, 6]]) is not None
    assert pages.num_saved_tokens == 24


def test_all_blocks_or_none():
    pages = HostPages(5, FREE)
    first = pages.save(10, [0, 1], [[7, 8], [9]])
    assert first.pages == ((0, 1), (2,))
    assert pages.save(10, [0], [[1, 2, 3]]) is None
    assert pages.num_free == 2
    second = pages.save(8, [0], [[1, 2]])
    pages.check([first, second])
    assert pages.num_saved_tokens == 18
    orders = pages.take_orders()
    assert orders.block_ids.tolist() == [7, 8, 9, 1, 2]
    assert orders.page_ids.tolist() == [0, 1, 2, 3, 4]
    assert orders.block_ids.dtype == orders.page_ids.dtype == np.int32
    assert pages.take_orders() is NO_COPIES


def test_a_pool_of_no_pages_saves_nothing():
    """Not even what needs none."""
    assert HostPages(0, FREE).save(4, [1], [[]]) is None
    assert HostPages(1, FREE).save(4, [1], [[]]).pages == ((),)


def test_a_copy_that_nobody_wants_is_not_ordered():
    pages = HostPages(4, FREE)
    first = pages.save(8, [0], [[5, 6]])
    second = pages.save(8, [0], [[7, 8]])
    pages.forget(first)
    assert pages.take_orders().page_ids.tolist() == [2, 3]
    pages.forget(second)
    assert pages.num_free == 4
    assert pages.save(16, [0], [[1, 2, 3, 4]]).pages == ((0, 1, 2, 3),)


def test_check_finds_lost_and_doubled_pages():
    pages = HostPages(4, FREE)
    saved = pages.save(8, [0], [[5, 6]])
    pages.check([saved])
    for held in ([], [saved, saved]):
        with pytest.raises(IntegrityError, match="Host pages"):
            pages.check(held)
    pages._free += [0, 1]
    with pytest.raises(IntegrityError, match="for nobody"):
        pages.check([])
