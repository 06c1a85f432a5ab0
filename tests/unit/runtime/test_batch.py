"""Row builder, compared with a naive computation of the places that each row sees."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from osd.runtime.batch import DeviceTokens, PackedRows, RowBuilder, consecutive_rows

NODES = 19  # more than two bytes of path bits
trees = st.lists(st.integers(0, NODES), max_size=NODES).map(lambda raw: [v % (i + 1) - 1 for i, v in enumerate(raw)])
sequences = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 4), trees), min_size=1, max_size=4)


def seen(rows: PackedRows, row: int) -> list[int]:
    """Return the places that a row sees, in order."""
    places = list(range(int(rows.visible[row])))
    if rows.mask is None or rows.base is None:
        return places
    return places + (int(rows.base[row]) + rows.mask[row].nonzero().squeeze(1)).tolist()


@settings(deadline=None, database=None, derandomize=True, max_examples=100)
@given(sequences)
def test_row_sees_earlier_places_and_a_node_its_path(batch: list[tuple[int, int, list[int]]]) -> None:
    builder, goal = RowBuilder(), []
    for slot, (start, count, parents) in enumerate(batch):
        assert builder.tokens(slot, start, range(100, 100 + count)) == len(goal)
        goal += [(100 + i, start + i, slot, start + i, [*range(start + i + 1)]) for i in range(count)]
        end = start + count
        assert builder.draft(slot, end, range(500, 500 + len(parents)), parents) == len(goal)
        for node in range(len(parents)):
            path, above = [node], parents[node]
            while above >= 0:
                path.insert(0, above)
                above = parents[above]
            depth = len(path)
            goal.append((500 + node, end + depth - 1, slot, end + node, [*range(end), *(end + i for i in path)]))
    assert len(builder) == len(goal)
    rows = builder.build()
    columns = (rows.token_ids, rows.positions, rows.slots, rows.stores)
    for row, (*numbers, places) in enumerate(goal):
        assert [int(column[row]) for column in columns] == numbers
        assert seen(rows, row) == places
    assert [column.dtype for column in columns] == [torch.int64, torch.int64, torch.int32, torch.int32]


def test_draft_without_branches_equals_consecutive_tokens() -> None:
    builder = RowBuilder()
    builder.tokens(2, 7, [5])
    builder.draft(2, 8, [6, 7], [-1, 0])
    rows, goal = builder.build(), consecutive_rows(2, 7, [5, 6, 7])
    assert rows.mask is None
    assert rows.base is None
    for name in ("token_ids", "positions", "slots", "stores", "visible"):
        assert torch.equal(getattr(rows, name), getattr(goal, name))


def test_unread_tokens_are_filled_in_from_their_drafts() -> None:
    builder = RowBuilder()
    builder.tokens(0, 0, [1, 0, 0, 4, 0, 6])
    drafts = [(torch.tensor([[12, 13, 99]]), [(1, 2)]), (torch.tensor([[88, 99], [15, 99]]), [(0, 0), (4, 1)])]
    rows = builder.build(DeviceTokens.of(len(builder), drafts))
    assert rows.settled().token_ids.tolist() == [1, 12, 13, 4, 15, 6]
    assert rows.settled().unread is None
    assert DeviceTokens.of(3, []) is None
