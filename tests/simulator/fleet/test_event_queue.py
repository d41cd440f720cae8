from extproc.simulator.fleet.event_queue import EventQueue


def test_events_happen_in_the_order_of_their_times():
    """The clock jumps to the next event, whatever order events were planned in."""
    timeline, events = EventQueue(), []
    for when in (3.0, 1.0, 2.0):
        timeline.at(when, lambda when=when: events.append((when, timeline.now)))
    while timeline.step():
        pass
    assert events == [(1.0, 1.0), (2.0, 2.0), (3.0, 3.0)]


def test_events_of_one_moment_keep_their_order():
    """Events of one moment happen in the order in which they were scheduled."""
    timeline, events = EventQueue(), []
    for n in range(5):
        timeline.at(1.0, lambda n=n: events.append(n))
    while timeline.step():
        pass
    assert events == [0, 1, 2, 3, 4]


def test_the_past_counts_as_now():
    """The clock never runs backwards."""
    timeline, events = EventQueue(), []
    timeline.at(5.0, lambda: timeline.at(1.0, lambda: events.append(timeline.now)))
    while timeline.step():
        pass
    assert events == [5.0]


def test_after_counts_from_now():
    """A delay is added to the clock."""
    timeline, events = EventQueue(), []
    timeline.at(2.0, lambda: timeline.after(0.5, lambda: events.append(timeline.now)))
    while timeline.step():
        pass
    assert events == [2.5]


def test_nothing_left_is_told():
    """Without events a step does nothing and says so."""
    timeline = EventQueue()
    assert not timeline.step()
    assert timeline.now == 0.0
