"""Contents: the laws, and what can be no content."""

import os
import shutil
import socket
from pathlib import PurePosixPath

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.artifacts.content import Content, FileEntry, differing_files, path_problem, scan
from tasks.artifacts.digest import Digest
from tasks.errors import ConfigError, StoreUnusable

LAW = settings(deadline=None, max_examples=50)
PARTS = st.text(
    st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="/\\"), min_size=1, max_size=8
).filter(lambda part: part not in (".", "..") and len(part.encode()) < 100)
PATHS = st.lists(PARTS, min_size=1, max_size=3).map("/".join)
ENTRIES = st.builds(FileEntry, PATHS, st.integers(0, 2**50), st.binary(max_size=4).map(Digest.of))


def no_file_is_a_folder(entries):
    paths = {entry.path for entry in entries}
    return not any(str(parent) in paths for path in paths for parent in PurePosixPath(path).parents)


CONTENTS = (
    st.lists(ENTRIES, min_size=1, max_size=6, unique_by=lambda e: e.path).filter(no_file_is_a_folder).map(Content.of)
)


@LAW
@given(CONTENTS)
def test_a_content_reads_back_from_its_json(content):
    again = Content.from_json(content.to_json())
    assert again == content
    assert again.digest == content.digest


@LAW
@given(CONTENTS, st.randoms())
def test_the_order_of_the_files_changes_nothing(content, random):
    files = list(content.files)
    random.shuffle(files)
    assert Content.of(files).digest == content.digest


@LAW
@given(CONTENTS, CONTENTS)
def test_contents_with_equal_digests_are_equal(one, other):
    assert (one.digest == other.digest) == (one == other)
    assert (one == other) == (differing_files(one, other) == () and one.size == other.size)


@LAW
@given(st.dictionaries(PATHS, st.binary(max_size=20), min_size=1, max_size=5))
def test_a_folder_and_its_copy_elsewhere_have_the_same_content(tmp_path_factory, files):
    folder = tmp_path_factory.mktemp("folder")
    for path, data in files.items():
        try:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data)
        except (FileExistsError, NotADirectoryError, IsADirectoryError):
            continue  # a file where another path has a folder: no folder can hold both
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "deeper" / "copy"
    shutil.copytree(folder, elsewhere, copy_function=shutil.copyfile)  # other times, other modes
    (elsewhere / "an empty folder is no content").mkdir()
    assert scan(folder) == scan(elsewhere)


@pytest.mark.parametrize(
    "path",
    ["", "/", "/abs", "a//b", "a/", "./a", "../a", "a/../b", "a/.", "a\\b", "a\nb", "a\x00b", "\x7f", "\udcff"],
)
def test_a_path_that_is_not_portable_is_refused(path):
    assert path_problem(path)
    with pytest.raises(ValueError, match=r"expected|holds|valid"):
        FileEntry(path, 0, Digest.of(b""))


def test_a_content_list_that_contradicts_itself_is_refused():
    a, b = FileEntry("a", 1, Digest.of(b"a")), FileEntry("b", 1, Digest.of(b"b"))
    for files in [(), (b, a), (a, a), (a, FileEntry("a/b", 1, Digest.of(b"b")))]:
        with pytest.raises(ValueError, match=r"content|file"):
            Content(files)


def test_a_content_list_of_another_format_is_refused():
    with pytest.raises(StoreUnusable, match=r"has format 99.*reads 1"):
        Content.from_json({"format": 99})


def test_the_digest_of_a_content_is_what_the_format_says(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "é b.txt").write_bytes(b"hello\n")
    text = (
        '{"files":[{"digest":"sha256:5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03",'
        '"path":"a/é b.txt","size":6}],"format":1}'
    )
    assert scan(tmp_path).to_bytes() == text.encode()
    assert scan(tmp_path).digest == Digest.of(text.encode())


def test_a_link_to_a_file_inside_counts_as_that_file(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"weights")
    (tmp_path / "latest.bin").symlink_to("model.bin")
    first, second = scan(tmp_path).files
    assert (first.path, second.path) == ("latest.bin", "model.bin")
    assert first.digest == second.digest


def make_socket(path):
    server = socket.socket(socket.AF_UNIX)
    server.bind(os.fspath(path))
    server.close()


BAD_ENTRIES = {
    "a link out of the folder": (lambda p: p.symlink_to("/etc/hostname"), "leads out of the folder, to /etc/hostname"),
    "a link by a relative way out": (lambda p: p.symlink_to("../../outside"), "leads out of the folder"),
    "a link that leads nowhere": (lambda p: p.symlink_to("missing"), "leads nowhere"),
    "a link to itself": (lambda p: p.symlink_to(p.name), "leads nowhere"),
    "a link to a folder": (lambda p: p.symlink_to("."), "no regular file"),
    "a named pipe": (os.mkfifo, "a named pipe can be no content"),
    "a socket": (make_socket, "a socket can be no content"),
}


@pytest.mark.parametrize("kind", BAD_ENTRIES)
def test_what_can_be_no_content_is_refused_with_its_path(tmp_path, monkeypatch, kind):
    make, message = BAD_ENTRIES[kind]
    folder = tmp_path / "product"
    folder.mkdir()
    (folder / "good").write_text("good")
    monkeypatch.chdir(folder)  # a socket's path is short
    make(folder / "bad")
    with pytest.raises(ConfigError, match=message) as error:
        scan(folder)
    assert [problem.file for problem in error.value.problems] == [folder / "bad"]


def test_a_device_is_refused(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("only root makes devices")
    os.mknod(tmp_path / "null", 0o600 | 0o020000, os.makedev(1, 3))
    with pytest.raises(ConfigError, match="a device can be no content"):
        scan(tmp_path)


@pytest.mark.parametrize("name", [b"new\nline", b"back\\slash", b"tab\t", b"latin-\xe9"])
def test_a_file_name_that_is_not_portable_is_refused_and_shown(tmp_path, name):
    os.close(os.open(os.fsencode(tmp_path) + b"/" + name, os.O_CREAT))
    with pytest.raises(ConfigError, match=r"(?s)a file name .*rename it"):
        scan(tmp_path)


def test_every_bad_entry_is_named_not_only_the_first(tmp_path):
    (tmp_path / "one").symlink_to("missing")
    (tmp_path / "two").symlink_to("missing")
    with pytest.raises(ConfigError) as error:
        scan(tmp_path)
    assert len(error.value.problems) == 2


def test_a_folder_without_files_is_refused(tmp_path):
    (tmp_path / "empty" / "deeper").mkdir(parents=True)
    with pytest.raises(ConfigError, match="has no files"):
        scan(tmp_path / "empty")
    with pytest.raises(ConfigError, match="no such folder"):
        scan(tmp_path / "missing")
