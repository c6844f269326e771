"""Which layers share a block table and a pool."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pelton.core.kv.groups import (
    StatePlace,
    block_bytes,
    group_layers,
    pool_of_layers,
    smallest_reusable_prefix,
    state_places,
    with_tables,
)
from pelton.core.kv.spec import KVGroup, LayerKV, RecurrentSpec
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


def recurrent(index, state_bytes):
    spec = RecurrentSpec(
        ssm_shape=(state_bytes // 4,), ssm_dtype="float32", conv_shape=(0,), conv_dtype="float32"
    )
    return layer(index, kind="recurrent", page_bytes=0, recurrent=spec)


def test_recurrent_layers_have_no_pool_and_no_table():
    """Every block costs what the attention layers need; the group exists for checkpoints alone."""
    layers = [recurrent(0, 3008), layer(1), recurrent(2, 3008), layer(3), recurrent(4, 1024)]
    assert block_bytes(layers) == 2 * 1024
    assert shared(layers) == [[1], [3]]
    assert members(layers) == [("full", None, (1, 3))]
    full, kept = group_layers(layers, 256)
    assert (full.layers, full.has_table, full.pages) == ((1, 3), True, 1)
    assert kept == KVGroup(index=1, layers=(0, 2, 4), block_size=256, kind="recurrent", pages=4)
    assert with_tables([full, kept]) == (full,)
    assert smallest_reusable_prefix([full, kept]) == 256


def test_states_are_spread_over_the_pools():
    """Three of three pages and one of one, in two pools; none lies where another does."""
    layers = [recurrent(0, 3008), layer(1), recurrent(2, 3008), layer(3), recurrent(4, 1024)]
    assert state_places(layers) == (
        StatePlace(0, 1, 0, 3),
        StatePlace(2, 3, 0, 3),
        StatePlace(4, 1, 3, 1),
    )


def test_a_pool_with_larger_pages_takes_more_states():
    layers = [layer(0), layer(1, page_bytes=4096), *(recurrent(i, 4096) for i in range(2, 7))]
    places = state_places(layers)
    assert [(place.host, place.first, place.count) for place in places] == [
        (1, 0, 1),
        (1, 1, 1),
        (1, 2, 1),
        (0, 0, 4),
        (1, 3, 1),
    ]
    assert group_layers(layers, 64)[-1].pages == 4


def test_states_without_attention_are_refused():
    with pytest.raises(UnsupportedError, match="recurrent layers alone"):
        group_layers([recurrent(0, 64)])


@pytest.mark.parametrize("kind", ["mla", "cross"])
def test_kinds_without_a_table_are_refused_by_name(kind):
    with pytest.raises(UnsupportedError, match=kind):
        group_layers([layer(0), layer(1, kind=kind)])


@pytest.mark.parametrize(("kind", "window"), [("window", None), ("window", 0), ("full", 8)])
def test_windows_that_cannot_be_are_refused(kind, window):
    with pytest.raises(ConfigError, match=f"window.*{window}.*layer 1"):
        group_layers([layer(0), layer(1, kind=kind, window=window)])
