"""Order and bounds of the batches that an engine sends again, without a socket."""

import pytest

from extproc.scrape import kv_event_replay
from extproc.scrape.kv_event_replay import END, BatchReplay


class Socket:
    """Connection to a replay socket, once it is open."""

    def __init__(self, on_open):
        self.requests = []
        self.is_closed = False
        on_open(self)

    def send(self, empty, start):
        self.requests.append((empty, int.from_bytes(start)))

    def close(self):
        self.is_closed = True


class ReplaySite:
    """A replay, its connections, and a clock."""

    def __init__(self):
        self.time = 100.0
        self.sockets = []
        self.waits_s = []
        self.replay = BatchReplay(self.connect, lambda: self.time)

    def connect(self, on_open, wait_s):
        self.waits_s.append(wait_s)
        self.sockets.append(Socket(on_open))
        return self.sockets[-1]


def test_each_request_has_a_connection_of_its_own():
    """Answers to an earlier one do not come with it."""
    site = ReplaySite()
    assert not site.replay.is_running
    site.replay.request(7, verify=False)
    site.replay.request(3, verify=True)
    assert [socket.requests for socket in site.sockets] == [[(b"", 7)], [(b"", 3)]]
    assert [socket.is_closed for socket in site.sockets] == [True, False]
    assert site.replay.is_running
    site.replay.close()
    assert site.sockets[1].is_closed
    assert not site.replay.is_running


@pytest.mark.parametrize(
    ("verify", "seqs", "expected"),
    [
        (False, [4, 5], ["take", "take"]),
        (True, [3, 4], ["compare", "take"]),
        (True, [9, 10], ["take", "take"]),
        (False, [2, 3, 4], ["skip", "skip", "take"]),
        (False, [9, 11, 12], ["take", "skip", "skip"]),
    ],
)
def test_batches_are_taken_in_order(verify, seqs, expected):
    """A gap at the beginning is lost; a gap behind a taken batch is requested again."""
    site = ReplaySite()
    site.replay.request(3, verify=verify)
    following, results = 4, []
    for seq in seqs:
        results.append(site.replay.sort(seq, following))
        if results[-1] == "take":
            following = seq + 1
    assert results == expected
    assert site.replay.has_hole == (seqs[-1] == 12)
    assert not site.replay.is_verifying


def test_a_replay_that_ends_in_silence_is_cut_off():
    """One without any new batch is not, nor one behind its bound: the socket is silent."""
    site = ReplaySite()
    for seq, is_cut_off in ((3, True), (2, False)):
        site.replay.request(3, verify=False)
        site.replay.sort(seq, 3)
        assert not site.replay.is_cut_off
        site.time += 2.0
        assert site.replay.is_cut_off == is_cut_off


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        ([b"", (5).to_bytes(8), b"x"], (5, b"x")),
        ([b"", b"topic", (5).to_bytes(8), b"x"], (5, b"x")),
        ([b"", END.to_bytes(8), b""], (END, b"")),
        ([b"x", (5).to_bytes(8), b"x"], None),
        ([b"", b"short", b"x"], None),
        ([b""], None),
        ([], None),
    ],
)
def test_messages_are_read_in_both_forms(frames, expected):
    """Any other is malformed."""
    assert ReplaySite().replay.read(frames) == expected


@pytest.mark.parametrize("bound", ["_MAX_BATCHES", "_MAX_BYTES"])
def test_answers_without_end_count_as_silence(bound, monkeypatch):
    """As does a time without any."""
    monkeypatch.setattr(kv_event_replay, bound, 20)
    site = ReplaySite()
    site.replay.request(0, verify=False)
    site.replay.sort(0, 0)
    frames = [b"", (0).to_bytes(8), b""]
    for _ in range(2):
        assert site.replay.read(frames) == (0, b"")
    assert not site.replay.is_silent
    for _ in range(19):
        last = site.replay.read(frames)
    assert last == (END, b"")
    assert site.replay.is_silent
    assert not site.replay.is_cut_off
    site.replay.forget_size()
    site.replay.request(0, verify=False)
    assert not site.replay.is_silent
    site.time += 2.0
    assert site.replay.is_silent


def test_requests_in_a_row_wait():
    """An engine may show a gap with every batch, and each request takes a connection."""
    site = ReplaySite()
    for _ in range(12):
        site.replay.request(0, verify=False)
    assert site.waits_s == pytest.approx([0.0] * 8 + [0.05, 0.1, 0.15, 0.2])
    site.time += 2.19
    assert not site.replay.is_silent
    site.time += 10.0
    site.replay.request(0, verify=False)
    assert site.waits_s[-1] == 0.0
