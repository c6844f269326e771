"""Checkpoints of recurrent state: taken from what is left over, cached whole, lost whole."""

from __future__ import annotations

import pytest

from pelton.config.params import SamplingParams
from pelton.core.kv.manager import KVManager
from pelton.core.kv.spec import KVGroup
from pelton.core.plan import SlotRef
from pelton.core.request import Request
from pelton.errors import IntegrityError

INTERVAL, PAGES = 8, 3


def manager(num_blocks=32, caching=True):
    """Blocks of 4 tokens, and checkpoints of 3 blocks after every 8."""
    groups = [
        KVGroup(index=0, layers=(0,), block_size=4),
        KVGroup(index=1, layers=(1,), block_size=INTERVAL, kind="recurrent", pages=PAGES),
    ]
    return KVManager(groups, num_blocks, enable_prefix_caching=caching)


def request(ids, name="r"):
    made = Request(name, ids, SamplingParams())
    made.ref = SlotRef(0, 1)
    return made


def launch(kv, made, num_tokens):
    """A step that computes up to that many tokens of a request."""
    made.num_computed_tokens = num_tokens
    return kv.checkpoint([made])


def land(kv, made, num_tokens, *others):
    """Its result; `others` hold blocks, too."""
    made.num_confirmed_tokens = num_tokens
    if num_tokens >= made.next_settle_length:
        kv.settle(made, num_tokens)
    kv.check([made, *others])


def keep(kv, ids, *lengths):
    """Cache a prompt, and checkpoints after these of its tokens; their blocks."""
    made = request(ids)
    assert kv.admit(made)
    kept = []
    for length in lengths:
        (save,) = launch(kv, made, length)
        assert (save.ref, save.length) == (made.ref, length)
        kept.append(save.block_ids.tolist())
        land(kv, made, length)
    land(kv, made, made.num_tokens)
    kv.release(made)
    kv.check([])
    return kept


@pytest.mark.parametrize(
    ("length", "hit"), [(7, 0), (8, 0), (9, 8), (15, 8), (16, 8), (17, 16), (30, 16)]
)
def test_a_hit_ends_at_a_checkpoint(length, hit):
    kv = manager()
    kept = keep(kv, range(30), 8, 16)
    again = request(range(length))
    admission = kv.admit(again)
    assert admission.num_hits == again.num_computed_tokens == hit
    assert admission.state_blocks.tolist() == (kept[hit // 8 - 1] if hit else [])
    again.num_confirmed_tokens = hit
    kv.check([again])
    assert kv.group_matches == [(length - 1) // 4 * 4 if length < 30 else 28, hit]


def test_the_last_state_is_enough():
    """Case 11: nothing is kept after 8, and the longest hit is there all the same."""
    kv = manager()
    keep(kv, range(30), 24)
    assert kv.admit(request(range(30))).num_hits == 24
    assert kv.admit(request(range(24))).num_hits == 0


def test_groups_agree_on_a_state_that_was_kept():
    """Attention has 16 tokens left, where no state is; the next shorter one is after 8."""
    kv = manager()
    keep(kv, range(30), 8, 24)
    again = request(range(30))
    assert kv.admit(again).num_hits == 24
    fifth = again.blocks[0][4]
    kv.release(again)
    kv._cache.remove(fifth)
    assert kv.admit(again).num_hits == 8
    assert kv.group_matches == [28 + 16, 24 + 24]


def test_a_checkpoint_is_nobodys():
    """Once cached its blocks are free: no neighbour, and no prompt that fills the pool, waits."""
    kv = manager(num_blocks=16)
    keep(kv, range(9), 8)
    assert kv.num_used == 0
    reader, long = request(range(9), "reader"), request(range(50, 98), "long")
    assert len(kv.admit(reader).state_blocks) == PAGES
    assert kv.num_used == 3
    reader.num_confirmed_tokens = 8
    assert kv.admit(long)
    assert kv.num_used == 15
    kv.check([reader, long])


def test_what_is_read_is_reused_last():
    kv = manager(num_blocks=16)
    (kept,) = keep(kv, range(9), 8)
    keep(kv, range(40, 50))
    reader = request(range(9))
    assert kv.admit(reader).state_blocks.tolist() == kept
    assert [block.block_id for block in kv._pool.free_blocks()][-PAGES:] == kept


def test_it_is_lost_as_a_whole():
    kv = manager(num_blocks=16)
    (kept,) = keep(kv, range(9), 8)
    for block in kv._pool.free_blocks():
        if block.block_id == kept[1]:
            kv._checkpoints.evict(block)
    kv.check([])
    assert [block.block_id for block in kv._pool.free_blocks()][:3] == kept[::-1]
    assert kv.admit(request(range(9))).num_hits == 0


def test_nothing_is_cached_before_the_result():
    """Case 12: and nothing stays of a life that ends before."""
    kv = manager()
    first = request(range(9))
    assert kv.admit(first)
    assert len(launch(kv, first, 8)) == 1
    kv.check([first])
    land(kv, first, 4)
    assert kv.admit(request(range(9), "second")).num_hits == 0
    kv.release(first)
    third = request(range(9), "third")
    assert kv.admit(third).num_hits == 0
    assert kv.num_used == 6


def test_the_newest_in_flight_is_given_up_first():
    kv = manager(num_blocks=16)
    first, second = request(range(8), "a"), request(range(20, 28), "b")
    assert kv.admit(first)
    assert kv.admit(second)
    launch(kv, first, 8)
    launch(kv, second, 8)
    assert kv.num_used == 10
    third = request(range(30, 54), "c")
    assert kv.admit(third)  # six blocks where five are free
    land(kv, second, 8, first, third)
    land(kv, first, 8, second, third)
    kv.release(third)
    kv.release(first)
    kv.release(second)
    assert kv.admit(request(range(9), "d")).num_hits == 8
    assert kv.admit(request(range(20, 29), "e")).num_hits == 0


def test_growth_takes_what_is_in_flight():
    kv = manager(num_blocks=6)
    first = request(range(8))
    assert kv.admit(first)
    assert len(launch(kv, first, 8)) == 1
    assert kv.num_used == 5
    assert kv.grow(first, 20) is not None
    assert kv.grow(first, 24) is None
    land(kv, first, 8)
    assert kv.num_used == 5


def test_none_is_taken_where_too_little_is_free():
    kv = manager(num_blocks=5)
    made = request(range(8))
    assert kv.admit(made)
    assert kv.chunk(made, 8) == 8
    assert launch(kv, made, 8) == []
    kv.check([made])


def test_what_is_there_is_not_made_again():
    kv = manager()
    keep(kv, range(30), 8)
    again = request(range(30))
    assert kv.admit(again).num_hits == 8
    other = request(range(30), "other")
    assert kv.admit(other)
    assert kv.chunk(again, 22) == 8
    assert kv.chunk(again, 7) == 7
    assert len(launch(kv, again, 16)) == 1
    assert kv.chunk(other, 22) == 16  # the one after 16 is on its way
    assert launch(kv, other, 16) == []
    other.num_confirmed_tokens = 8
    land(kv, again, 16, other)
    assert launch(kv, other, 16) == []


def test_two_that_decode_the_same_make_one():
    """What they decode is not known when it is taken."""
    kv = manager()
    twins = [request(range(7), "a"), request(range(7), "b")]
    for twin in twins:
        assert kv.admit(twin)
        assert kv.grow(twin, 8) is not None
        assert len(launch(kv, twin, 8)) == 1
    for twin in twins:
        twin.append(50)
        twin.append(51)
        land(kv, twin, 8, *(other for other in twins if other is not twin))
    kv.check(twins)
    assert kv.admit(request([*range(7), 50, 3], "c")).num_hits == 8


def test_of_an_answer_the_newest_is_kept():
    """And all of the prompt; the blocks of the others are the next to be used."""
    kv = manager()
    made = request(range(18))
    assert kv.admit(made)
    for length in (8, 16):
        launch(kv, made, length)
        land(kv, made, length)
    for token in range(50, 70):
        made.append(token)
    kept = []
    for length in (24, 32):
        assert kv.grow(made, length) is not None
        (save,) = launch(kv, made, length)
        kept.append(save.block_ids.tolist())
        land(kv, made, length)
    assert [block.block_id for block in kv._pool.free_blocks()][:PAGES] == kept[0][::-1]
    kv.release(made)
    tokens = made.known_token_ids.tolist()
    for length, hit in ((38, 32), (31, 16), (15, 8)):
        reader = request(tokens[:length], "reader")
        assert kv.admit(reader).num_hits == hit
        kv.release(reader)
    kv.check([])


def test_a_faulty_request_leaves_no_state():
    """Case 19."""
    kv = manager()
    keep(kv, range(30), 8, 16)
    bad = request(range(30))
    assert kv.admit(bad).num_hits == 16
    assert len(launch(kv, bad, 24)) == 1
    kv.release_distrusted(bad)
    kv.check([])
    assert kv.group_matches[1] == 16
    assert kv.admit(request(range(30))).num_hits == 0


def test_checkpoints_are_no_part_of_what_a_request_needs():
    kv = manager(num_blocks=16)
    assert kv.num_blocks_for(30) == 8
    assert kv.max_tokens() == 60


def test_without_prefix_caching_nothing_is_kept():
    kv = manager(caching=False)
    made = request(range(30))
    assert kv.admit(made).num_hits == 0
    assert kv.chunk(made, 30) == 30
    assert launch(kv, made, 8) == []
    kv.check([made])
    assert kv.group_matches == [0, 0]


@pytest.mark.parametrize("damage", ["lost page", "in use", "count"])
def test_the_check_can_fail(damage):
    kv = manager()
    (kept,) = keep(kv, range(9), 8)
    block = kv._pool.blocks[kept[-1]]
    if damage == "lost page":
        kv._cache.remove(block)
    elif damage == "in use":
        kv._pool.touch([block])
    else:
        kv._checkpoints.num_pending_blocks += 1
    with pytest.raises(IntegrityError):
        kv.check([])
