from __future__ import annotations

import numpy as np
from support.batch import read

from pelton.device.fake import FakeDevice
from pelton.sampling.list_pool import ListPool


def test_lists_keep_their_content_over_growth_and_reuse():
    device = FakeDevice()
    pool = ListPool(device)
    rng = np.random.default_rng(0)
    held: dict[int, np.ndarray] = {}
    for count in range(300):
        if held and rng.random() < 0.45:
            start = list(held)[rng.integers(len(held))]
            pool.remove(start, len(held.pop(start)))
        else:
            words = rng.integers(-(2**31), 2**31, rng.integers(1, 200)).astype(np.int32)
            start = pool.add(words)
            assert start not in held
            held[start] = words
            words[:] = words.copy()
        if count % 60 == 59:
            content = read(device, pool.tensor)
            for start, words in held.items():
                assert content[start : start + len(words)].tolist() == words.tolist()
    assert len(held) > 10


def test_what_is_given_back_is_given_out_again():
    """So memory is bounded by what is held at once, and not by how many requests there were."""
    pool = ListPool(FakeDevice())
    for count in range(100):
        first = pool.add(np.zeros(20 + count % 10, np.int32))
        second = pool.add(np.zeros(100, np.int32))
        pool.remove(first, 20 + count % 10)
        pool.remove(second, 100)
    assert len(pool.tensor) <= 256
    assert len(ListPool(FakeDevice()).tensor) == 0
