"""What rows copy of what each reads alone: little padding, whatever they read."""

from hypothesis import example, given
from hypothesis import strategies as st

from umbel.models.kv.read_alone import room_for


@given(alone=st.lists(st.integers(0, 5000), min_size=1, max_size=16))
@example(alone=[4000, *[0] * 15])
@example(alone=[12_000] * 8)
def test_padding_is_no_more_than_what_is_read(alone: list[int]) -> None:
    """But for 64 tokens a row; somebody fits, and rows that are alike all do."""
    room = room_for(alone)
    copied = [tokens for tokens in alone if tokens <= room]
    assert room in copied
    assert room * len(alone) <= 2 * sum(alone) + 64 * len(alone)
    assert max(alone) > 2 * sum(alone) / len(alone) or room == max(alone)


def test_who_reads_far_more_than_others_has_no_room() -> None:
    """It reads where its tokens lie."""
    assert room_for([4000, 0, 0, 0]) == 0
    assert room_for([4000, 100, 30, 0]) == 100
    assert room_for([4000, 0]) == 4000
