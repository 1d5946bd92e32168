"""Writes that are whole or not there, and that of several creators one wins."""

import threading

import pytest

from tasks.artifacts.durable import Scratch, create, names_in, remove_tree, replace


@pytest.fixture
def scratch(tmp_path):
    (tmp_path / "scratch").mkdir()
    yield Scratch(tmp_path / "scratch")
    assert names_in(tmp_path / "scratch") == []


def test_what_exists_is_not_created_again(tmp_path, scratch):
    assert create(tmp_path / "new/folder/file", b"first", scratch)
    assert not create(tmp_path / "new/folder/file", b"second", scratch)
    assert (tmp_path / "new/folder/file").read_bytes() == b"first"


def test_a_pointer_can_be_written_anew(tmp_path, scratch):
    replace(tmp_path / "new/pointer", b"first", scratch)
    replace(tmp_path / "new/pointer", b"second", scratch)
    assert (tmp_path / "new/pointer").read_bytes() == b"second"


def test_of_threads_that_create_the_same_file_one_wins_and_all_see_its_bytes(tmp_path, scratch):
    for trial in range(30):
        path, won, seen, barrier = tmp_path / f"{trial}", [], [], threading.Barrier(4)

        def contend(number, path=path, won=won, seen=seen, barrier=barrier):
            barrier.wait()
            if create(path, b"%d" % number * 1000, scratch, durable=False):
                won.append(b"%d" % number * 1000)
            seen.append(path.read_bytes())

        threads = [threading.Thread(target=contend, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1
        assert set(seen) == set(won)


def test_a_folder_that_is_gone_already_is_removed(tmp_path):
    (tmp_path / "folder/deeper").mkdir(parents=True)
    remove_tree(tmp_path / "folder")
    remove_tree(tmp_path / "folder")
    assert names_in(tmp_path) == names_in(tmp_path / "folder") == []
