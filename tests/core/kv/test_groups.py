"""Which layers share a block table and a pool."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pelton.core.kv.groups import (
    block_bytes,
    group_layers,
    pool_of_layers,
    smallest_reusable_prefix,
)
from pelton.core.kv.spec import KVGroup, LayerKV
from pelton.errors import ConfigError, UnsupportedError


def layer(index, window=None, **changes):
    made = LayerKV(
        index=index,
        num_kv_heads=2,
        head_dim=16,
        block_size=4,
        page_bytes=1024,
        dtype="float32",
        kind="full" if window is None else "window",
        window=window,
    )
    return replace(made, **changes)


def members(layers):
    return [(group.kind, group.window, group.layers) for group in group_layers(layers)]


def shared(layers):
    """Layers by the pool they lie in."""
    pools = {}
    for index, host in pool_of_layers(layers).items():
        pools.setdefault(host, []).append(index)
    return sorted(sorted(pool) for pool in pools.values())


def test_layers_alike_are_one_group_with_a_pool_each():
    for window in (None, 8):
        layers = [layer(i, window) for i in range(3)]
        kind = "full" if window is None else "window"
        assert members(layers) == [(kind, window, (0, 1, 2))]
        assert shared(layers) == [[0], [1], [2]]
        assert block_bytes(layers) == 3 * 1024


def test_kinds_are_split_to_the_size_of_the_smallest():
    """Three windows to one full layer: four tables, and a block costs two pages, not eight."""
    layers = [layer(i, None if i % 4 == 3 else 8) for i in range(8)]
    assert members(layers) == [
        ("window", 8, (0, 1)),
        ("window", 8, (2, 4)),
        ("window", 8, (5, 6)),
        ("full", None, (3, 7)),
    ]
    assert shared(layers) == [[0, 2, 3, 5], [1, 4, 6, 7]]
    assert block_bytes(layers) == 2 * 1024


def test_a_rest_that_fills_no_group():
    layers = [layer(i, None if i in (0, 3) else 8) for i in range(5)]
    assert members(layers) == [("full", None, (0, 3)), ("window", 8, (1, 2)), ("window", 8, (4,))]
    assert shared(layers) == [[0, 1, 4], [2, 3]]


def test_no_two_layers_of_a_group_share_a_pool():
    for count in range(1, 9):
        layers = [layer(i, (None, 8, 5)[i % 3 if i < 6 else 1]) for i in range(count)]
        pools = pool_of_layers(layers)
        assert sorted(pools) == list(range(count))
        for group in group_layers(layers):
            assert len({pools[index] for index in group.layers}) == len(group.layers)


def test_other_layouts_share_no_pool():
    """And are not split: there is nothing to win."""
    layers = [layer(0), layer(1, 8, head_dim=32, page_bytes=2048), layer(2, 8)]
    assert members(layers) == [("full", None, (0,)), ("window", 8, (1, 2))]
    assert shared(layers) == [[0, 2], [1]]
    assert block_bytes(layers) == 1024 + 2048
    layers = [layer(0), layer(1, 8, block_size=8, page_bytes=2048)]
    assert [group.block_size for group in group_layers(layers)] == [4, 8]
    assert shared(layers) == [[0], [1]]


def test_a_layer_that_shares_joins_the_group_and_the_pool():
    layers = [layer(0), layer(1, 8), layer(2, 8, shares=1), layer(3, shares=0)]
    assert members(layers) == [("full", None, (0, 3)), ("window", 8, (1, 2))]
    assert shared(layers) == [[0, 1, 2, 3]]
    assert block_bytes(layers) == 1024


def test_smallest_reusable_prefix():
    sizes = (4, 6, 16)
    groups = [KVGroup(index=i, layers=(i,), block_size=size) for i, size in enumerate(sizes)]
    assert smallest_reusable_prefix(groups[:1]) == 4
    assert smallest_reusable_prefix(groups) == 48


@pytest.mark.parametrize("kind", ["mla", "recurrent", "cross"])
def test_kinds_without_a_table_are_refused_by_name(kind):
    with pytest.raises(UnsupportedError, match=kind):
        group_layers([layer(0), layer(1, kind=kind)])


@pytest.mark.parametrize(("kind", "window"), [("window", None), ("window", 0), ("full", 8)])
def test_windows_that_cannot_be_are_refused(kind, window):
    with pytest.raises(ConfigError, match=f"window.*{window}.*layer 1"):
        group_layers([layer(0), layer(1, kind=kind, window=window)])
