from extproc.simulator.fleet.sim_request import Streams


def test_one_stream_is_read_further():
    """A longer reading of a stream begins with the shorter one."""
    streams = Streams()
    short, long = streams.keys("a", 160), streams.keys("a", 330)
    assert list(long[: len(short)]) == list(short)
    assert (len(short), len(long)) == (10, 20)


def test_streams_share_nothing():
    """Texts of different names have no block in common."""
    streams = Streams()
    assert not set(streams.keys("a", 1600)) & set(streams.keys("b", 1600))


def test_joined_texts_share_full_blocks_of_their_beginning():
    """The block in which a text leaves the shared one is its own."""
    streams = Streams()
    first = streams.joined("system", 1, first=40, tokens=160)
    second = streams.joined("system", 2, first=40, tokens=160)
    assert len(first) == len(second) == 10
    assert first[:2] == second[:2]
    assert not set(first[2:]) & set(second[2:])


def test_a_text_shorter_than_the_shared_one_is_its_beginning():
    """No reader goes beyond the end of its own text."""
    streams = Streams()
    assert list(streams.joined("system", 1, first=400, tokens=64)) == list(
        streams.keys("system", 64)
    )
