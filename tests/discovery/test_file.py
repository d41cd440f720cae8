import os
import pathlib
import threading

import pytest
import yaml

from extproc.discovery import static_discovery, yaml_loader
from extproc.errors import ConfigError


def load(path, limit_bytes=10_000):
    return static_discovery.load_file(path, limit_bytes=limit_bytes)


#: Mappings that merge each other: the last of them would have a billion keys.
MERGES = b"a: &a {k: v}\n" + b"".join(
    b"%c: &%c {<<: [%s]}\n" % (at, at, b", ".join([b"*%c" % (at - 1)] * 9))
    for at in range(ord("b"), ord("k"))
)


@pytest.mark.parametrize(
    "text",
    [
        "endpoints:\n- name: a\n  address: 10.0.0.1\n  port: 8000\n  labels: {gpu: h100}\n",
        '{"endpoints": [{"name":"a","address":"10.0.0.1","port":8000,"labels":{"gpu":"h100"}}]}',
    ],
)
def test_yaml_and_json_are_read(tmp_path, text):
    """Upstream's file-discovery format, in either syntax."""
    path = tmp_path / "pool"
    path.write_text(text)
    (entry,) = load(path)
    assert (entry.name, entry.host, entry.port, entry.labels) == (
        "a",
        "10.0.0.1",
        8000,
        {"gpu": "h100"},
    )


def test_merged_labels_are_read(tmp_path):
    """Keys of the entry come before those that it merges."""
    path = tmp_path / "pool.yaml"
    path.write_text(
        "endpoints:\n"
        "- {address: 10.0.0.1, port: 1, labels: &common {gpu: h100, zone: a}}\n"
        "- {address: 10.0.0.2, port: 1, labels: {<<: *common, zone: b}}\n"
    )
    assert [entry.labels for entry in load(path)] == [
        {"gpu": "h100", "zone": "a"},
        {"gpu": "h100", "zone": "b"},
    ]


def test_merged_keys_are_counted_before_they_are_collected(monkeypatch):
    """A list of the same mapping thousands of times is refused at the one that exceeds the bound."""
    monkeypatch.setattr(yaml_loader, "_MAX_MERGED", 100)
    text = f"a: &a {{k: 1, l: 2}}\nb: {{<<: [{', '.join(['*a'] * 1_000)}]}}"
    loader = yaml_loader.YAML_LOADER(text)
    with pytest.raises(yaml.YAMLError, match="more than 100 keys by <<"):
        loader.get_single_data()
    assert loader._merged == 102


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"endpoints: [", "expected YAML or JSON"),
        (b"\x00\xff", "expected YAML or JSON"),
        (b"endpoints: !!python/object/apply:os.getpid []", "expected YAML or JSON"),
        (b'endpoints: !!int ""', "expected YAML or JSON"),
        (b"endpoints: !!bool x", "expected YAML or JSON"),
        (b"endpoints: !!timestamp x", "expected YAML or JSON"),
        (b"endpoints: 0x" + b"f" * 900, "got a huge number"),
        (b"? 0x" + b"f" * 900 + b"\n: []", "got a huge number"),
        (b"endpoints: 1" + b":1" * 500, "a number of more than 1000 characters"),
        (b"? !!float 1" + b":1" * 500, "a number of more than 1000 characters"),
        (b"", "expected a mapping"),
        (b"endpoints: [a]", "endpoints[0]: expected"),
        (b"endpoints: " + b"[" * 101, "more than 100 levels of nesting"),
        (b"endpoints: " + b"{a: " * 2_000, "more than 100 levels of nesting"),
        (b"- " * 101, "more than 100 levels of nesting"),
        (MERGES, "more than 1000000 keys by <<"),
        (b"#" * 10_001, "at most 10000 bytes"),
    ],
)
def test_a_broken_file_is_refused_by_name(tmp_path, content, message):
    """Every way of being broken names the file and what was wanted."""
    path = tmp_path / "pool.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as raised:
        load(path)
    assert str(raised.value).startswith(str(path))
    assert message in str(raised.value)


def test_deep_nesting_is_refused(tmp_path):
    """A file made to exhaust the stack is a broken file."""
    path = tmp_path / "pool.yaml"
    path.write_bytes(b"[" * 5_000 + b"]" * 5_000)
    with pytest.raises(ConfigError):
        load(path, 100_000)


def test_a_missing_file_is_refused():
    """The message holds the path and the system's reason."""
    with pytest.raises(ConfigError, match="No such file"):
        load(pathlib.Path("nowhere/pool.yaml"))


def test_a_pipe_is_read_once(tmp_path):
    """At the start the list may come from a command; read again, a pipe could block for ever."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="an endpoints file, got a pipe"):
        static_discovery.load_file(path, limit_bytes=10_000, again=True)
    writer = threading.Thread(
        target=path.write_text, args=("endpoints: [{name: a, address: 10.0.0.1, port: 1}]",)
    )
    writer.start()
    assert [entry.name for entry in load(path)] == ["a"]
    writer.join()


def test_only_a_regular_file_is_opened_again(tmp_path):
    """A folder and a device are none; a link to one is."""
    (tmp_path / "pool.yaml").write_text("endpoints: []")
    (tmp_path / "link").symlink_to("pool.yaml")
    assert static_discovery.load_file(tmp_path / "link", limit_bytes=100, again=True) == ()
    for name, reason in ((tmp_path, "Is a directory"), ("/dev/zero", "a device")):
        with pytest.raises(ConfigError, match=reason):
            static_discovery.load_file(pathlib.Path(name), limit_bytes=100, again=True)


def test_the_stamp_follows_a_symlink_swap(tmp_path):
    """A ConfigMap update swaps a symbolic link; the stamp changes though path and text do not."""
    for version in ("one", "two"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "pool.yaml").write_text("endpoints: []")
    link = tmp_path / "data"
    link.symlink_to("one")
    before = static_discovery.file_stamp(link / "pool.yaml")
    (tmp_path / "next").symlink_to("two")
    (tmp_path / "next").rename(link)
    assert static_discovery.file_stamp(link / "pool.yaml") != before
    assert static_discovery.file_stamp(tmp_path / "nowhere") == static_discovery.FileStamp()


def test_a_change_of_permissions_changes_the_stamp(tmp_path):
    """A file that could not be read is read again once it can be."""
    path = tmp_path / "pool.yaml"
    path.write_text("pool: {}")
    before = static_discovery.file_stamp(path)
    while path.stat().st_ctime_ns == before.changed_ns:  # file systems count in ms
        path.chmod(0o600)
    assert static_discovery.file_stamp(path) != before
