import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bertsmith.packed import Layout, PackedBatch, pack, split_by_budget, unpack

sequences = st.lists(st.lists(st.integers(0, 30_000), max_size=40), max_size=12)


@given(sequences)
def test_unpacking_gives_back_what_was_packed(texts):
    batch = pack(texts)
    assert [each.tolist() for each in unpack(batch.tokens_T, batch.layout)] == texts
    assert batch.positions_T.tolist() == [place for text in texts for place in range(len(text))]
    assert batch.layout.longest == max(map(len, texts), default=0)
    assert batch.layout.sequences == len(texts)


@given(st.lists(st.integers(1, 50), max_size=60), st.integers(1, 100))
def test_splitting_keeps_the_order_and_the_budget(lengths, budget):
    groups = split_by_budget(lengths, budget)
    assert [number for group in groups for number in group] == list(range(len(lengths)))
    for group in groups:
        assert sum(lengths[number] for number in group) <= budget or len(group) == 1


def test_segments_travel_with_their_tokens():
    batch = pack([[4, 5], [6]], [[0, 1], [1]])
    assert batch.segments_T.tolist() == [0, 1, 1]
    assert pack([[4, 5]]).segments_T.tolist() == [0, 0]


def test_a_batch_moves_to_another_device_whole():
    batch = pack([[4, 5], [6]])
    types = PackedBatch(batch.tokens_T, batch.segments_T, batch.positions_T, batch.layout, batch.tokens_T)
    moved = types.to("meta")
    parts = (moved.tokens_T, moved.segments_T, moved.positions_T, moved.task_types_T, moved.layout.starts_S1)
    assert all(part.device.type == "meta" for part in parts)
    assert moved.layout.longest == 2
    assert batch.to("cpu").task_types_T is None


def test_a_layout_cannot_be_changed():
    with pytest.raises(AttributeError):
        Layout(torch.zeros(2, dtype=torch.int32), 0).longest = 3
