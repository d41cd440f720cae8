from tests.docs import recording_example


def test_the_example_of_the_documentation_is_current():
    """A change of the rows changes the file that the guide shows."""
    expected = recording_example.render()
    assert recording_example.PATH.read_bytes() == expected, (
        "run python -m tests.docs.recording_example"
    )
