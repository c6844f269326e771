from __future__ import annotations

import pytest
import torch

from pelton.ops.copy_states import StateCopy, load_states, save_states

ROWS, RING, BLOCKS = 4, 3, 12


def copies_of(state_bytes: int, page_bytes: int) -> list[StateCopy]:
    """Two layers in one pool, the second behind the first, and one in another pool."""
    count = -(-state_bytes // page_bytes)
    generator = torch.Generator().manual_seed(state_bytes + page_bytes)

    def bytes_of(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)

    shared, alone = bytes_of(BLOCKS, page_bytes), bytes_of(BLOCKS, page_bytes)
    return [
        StateCopy(bytes_of(ROWS, RING, state_bytes), pages, first, count)
        for pages, first in ((shared, 0), (shared, count), (alone, 0))
    ]


def pieces(copy: StateCopy, command: list[int]) -> list[tuple[int, int, int, int]]:
    """(block, byte in the block, byte in the state, number of bytes), in plain loops."""
    size, page = copy.states.shape[2], copy.pages.shape[1]
    blocks = command[2:][copy.first : copy.first + copy.count]
    return [
        (block, 0, i * page, min(page, size - i * page))
        for i, block in enumerate(blocks)
        if i * page < size
    ]


@pytest.mark.parametrize("num_commands", [0, 1, 2])
@pytest.mark.parametrize(
    ("state_bytes", "page_bytes"), [(16, 64), (64, 64), (80, 32), (96, 32), (112, 33), (48, 11)]
)
def test_bytes_go_where_they_belong_and_nowhere_else(state_bytes, page_bytes, num_commands):
    copies = copies_of(state_bytes, page_bytes)
    pages = 2 * copies[0].count
    if pages * num_commands > BLOCKS - 1:
        num_commands = 1
    ids = iter([7, 3, 11, 1, 9, 5, 2, 8, 10, 4, 6])
    rows = [(2, 1), (0, 2)]
    commands = [[*rows[i], *(next(ids) for _ in range(pages))] for i in range(num_commands)]
    given = torch.tensor(commands, dtype=torch.int32).view(num_commands, 2 + pages)

    expected = {id(copy.pages): copy.pages.clone() for copy in copies}
    for copy in copies:
        for command in commands:
            state = copy.states[command[0], command[1]]
            for block, at, start, size in pieces(copy, command):
                expected[id(copy.pages)][block, at : at + size] = state[start : start + size]
    save_states(given, copies)
    for copy in copies:
        assert torch.equal(copy.pages, expected[id(copy.pages)])

    # Other rows, at other places of their rings, get what was saved.
    targets = [(1, 0), (3, 1)]
    after = [copy.states.clone() for copy in copies]
    for copy, states in zip(copies, after):
        for (slot, index), (from_slot, from_index) in zip(targets, rows[:num_commands]):
            states[slot, index] = copy.states[from_slot, from_index]
    for i in range(num_commands):
        given[i, :2] = torch.tensor(targets[i])
    load_states(given, copies)
    for copy, states in zip(copies, after):
        assert torch.equal(copy.states, states)


def test_one_checkpoint_for_two_rows():
    copies = copies_of(80, 32)
    save_states(torch.tensor([[2, 1, *range(1, 7)]], dtype=torch.int32), copies)
    both = torch.tensor([[0, 0, *range(1, 7)], [3, 2, *range(1, 7)]], dtype=torch.int32)
    load_states(both, copies)
    for copy in copies:
        assert torch.equal(copy.states[0, 0], copy.states[2, 1])
        assert torch.equal(copy.states[3, 2], copy.states[2, 1])
