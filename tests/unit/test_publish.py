"""Publishing into a local model repository: what is planned, what is refused, and that nobody ever sees half of it."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from tasks.errors import ConfigError, Refused, StoreUnusable
from tasks.publish import (
    Provenance,
    Repository,
    clear_leftovers,
    commit,
    commit_config,
    observe,
    place_version,
    plan,
    release_config,
    require_usable,
)
from tasks.toolchain.config_pbtxt import with_versions
from tasks.toolchain.model_repository import models_of

PROGRAM = Path(__file__).parent / "publishing.py"
_spec = spec_from_file_location("publishing", PROGRAM)
publishing = module_from_spec(_spec)
_spec.loader.exec_module(publishing)

CONFIG, MODEL = publishing.CONFIG, publishing.MODEL
files_of, publish, source_of, wanted = publishing.files_of, publishing.publish, publishing.source_of, publishing.wanted


@pytest.fixture
def repository(tmp_path) -> Repository:
    return Repository(tmp_path / "models")


@pytest.fixture
def folder(repository) -> Path:
    return repository.path / MODEL


def tree(root: Path) -> dict[str, object]:
    """Everything below `root`: bytes, links and times."""
    if not root.exists():
        return {}
    return {
        path.relative_to(root).as_posix(): (
            path.lstat().st_mtime_ns,
            path.readlink() if path.is_symlink() else path.read_bytes() if path.is_file() else None,
        )
        for path in sorted(root.rglob("*"))
    }


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def config_text(folder: Path) -> str:
    return (folder / "config.pbtxt").read_text()


def make_by_hand(folder: Path, *versions: str, config: str | None = 'name: "digits"\n') -> None:
    for version in versions:
        (folder / version).mkdir(parents=True)
        (folder / version / "model.onnx").write_bytes(b"by hand")
    if config is not None:
        (folder / "config.pbtxt").write_text(config)


# What is placed


def test_the_first_version_goes_into_a_repository_that_does_not_exist_yet(repository, folder):
    published = publish(repository, files_of(1)).reuses
    assert published.version == 1
    assert published.folder == folder / "1"
    for path, data in files_of(1).items():
        assert (folder / "1" / path).read_bytes() == data
        assert (folder / "1" / path).stat().st_mode & 0o222 == 0
    assert config_text(folder) == with_versions(CONFIG, [1])
    assert names(folder) == ["1", "config.pbtxt"]


def test_provenance_says_what_the_version_is_and_where_it_comes_from(repository, folder):
    publish(repository, files_of(1), number=3)
    value = json.loads((folder / "1" / "provenance.json").read_text())
    assert value["format"] == 1
    assert (value["pipeline"], value["model"], value["version"]) == ("numbers", "digits", 1)
    asked = wanted(files_of(1), number=3)
    assert value["materials"]["engine"] == {
        "name": "numbers/engine@3",
        "content": str(asked.engine.content),
        "record": str(asked.engine.record),
    }
    assert value["materials"]["config"]["name"] == "numbers/triton_config@3"
    assert {(f["path"], f["size"], f["digest"]) for f in value["files"]} == {
        (f.path, f.size, str(f.digest)) for f in asked.files
    }
    assert value["created"].endswith("+00:00")
    assert value["actor"] == "tester@here"
    assert Provenance.from_json(value).to_json() == value


def test_the_second_time_nothing_is_done(repository, folder):
    publish(repository, files_of(1))
    before = tree(folder)
    again = plan(observe(repository, MODEL), wanted(files_of(1)))
    assert again.steps == ()
    assert str(again) == f"model digits in {repository.path}: version 1 is published; nothing to do"
    place_version(again, lambda _: pytest.fail("nothing is to be copied"))
    assert commit(again) is False
    assert tree(folder) == before


def test_planning_changes_nothing_and_says_what_would_be_done(repository, folder):
    publish(repository, files_of(1))
    before = tree(folder)
    todo = plan(observe(repository, MODEL), wanted(files_of(2), number=7))
    text = str(todo)
    assert f"place version 2 from numbers/engine@7 ({wanted(files_of(2)).engine.content.short})" in text
    assert "replace config.pbtxt, listing 1, 2" in text
    assert "-    versions: [1]\n    +    versions: [1, 2]" in text
    assert json.loads(json.dumps(todo.to_json())) == {
        "repository": str(repository.path),
        "model": "digits",
        "version": 2,
        "reused": False,
        "previous": 1,
        "champion": 1,
        "config": with_versions(CONFIG, [1, 2]),
        "steps": list(todo.steps),
    }
    assert tree(folder) == before


def test_a_version_is_placed_without_being_listed(repository, folder):
    publish(repository, files_of(1))
    place_version(plan(observe(repository, MODEL), wanted(files_of(2))), source_of(files_of(2)))
    assert config_text(folder) == with_versions(CONFIG, [1])
    assert observe(repository, MODEL).champion == 1
    again = plan(observe(repository, MODEL), wanted(files_of(2)))
    assert again.reuses.version == 2, "an interrupted publish goes on from what it had placed"


def test_the_champion_is_the_newest_and_only_the_one_before_it_stays_listed(repository, folder):
    for seed in (1, 2, 3):
        publish(repository, files_of(seed))
    assert observe(repository, MODEL).champion == 3
    assert observe(repository, MODEL).listed == (2, 3)
    assert sorted(observe(repository, MODEL).versions) == [1, 2, 3]


def test_another_config_releases_the_same_version(repository, folder):
    publish(repository, files_of(1))
    publish(repository, files_of(2))
    other = CONFIG.replace("max_batch_size: 8", "max_batch_size: 4")
    todo = publish(repository, files_of(2), config=other)
    assert (todo.version, todo.previous) == (2, 1)
    assert config_text(folder) == with_versions(other, [1, 2])


def test_an_older_content_gets_a_new_number_since_the_champion_is_the_highest(repository):
    publish(repository, files_of(1))
    publish(repository, files_of(2))
    todo = publish(repository, files_of(1))
    assert (todo.version, todo.previous) == (3, 2)


def test_after_going_back_the_content_of_a_dropped_version_is_used_again(repository, folder):
    publish(repository, files_of(1))
    publish(repository, files_of(2))
    commit_config(folder, release_config(CONFIG, 1, None), replacing=config_text(folder))
    assert observe(repository, MODEL).champion == 1
    assert publish(repository, files_of(2)).version == 2
    assert observe(repository, MODEL).listed == (1, 2)


def test_a_number_is_never_used_again(repository, folder):
    publish(repository, files_of(1))
    assert publish(repository, files_of(2), used=[5]).version == 6, "a record names it, though its folder is gone"
    shutil.rmtree(folder / "6")
    assert publish(repository, files_of(3)).version == 7, "the config still lists it"
    assert observe(repository, MODEL).listed == (1, 7), "a listed version that is gone would block the load"


def test_ten_follows_nine(repository):
    for seed in range(1, 11):
        todo = publish(repository, files_of(seed, size=10))
    assert (todo.version, todo.previous) == (10, 9)


def test_the_models_of_a_repository_are_those_that_were_released(repository):
    assert models_of(repository) == ()
    publish(repository, files_of(1))
    make_by_hand(repository.path / "by_hand", "1")
    (repository.path / "placed_but_not_committed" / "1").mkdir(parents=True)
    (repository.path / "README.md").write_text("a file")
    (repository.path / "link").symlink_to(repository.path / MODEL)
    assert models_of(repository) == (MODEL,)


# What is refused


def test_another_signature_is_refused_with_both_shown(repository, folder):
    publish(repository, files_of(1))
    before = tree(repository.path)
    with pytest.raises(Refused) as caught:
        plan(observe(repository, MODEL), wanted(files_of(2), config=CONFIG.replace("dims: [4]", "dims: [5]")))
    assert "champion: x FP32 [batch, 4] -> y FP32 [batch, 2]" in str(caught.value)
    assert "wanted:   x FP32 [batch, 5] -> y FP32 [batch, 2]" in str(caught.value)
    assert "another `model` name" in str(caught.value)
    assert tree(repository.path) == before


BY_HAND = {
    "a config": (["1"], 'name: "digits"\n'),
    "a config without versions": ([], 'name: "digits"\n'),
    "a config with numbers that Triton ignores": (["02", "v3"], 'name: "digits"\n'),
    "a version without a config, which Triton completes": (["1"], None),
    "a config that cannot be read": (["1"], "\ufeffname: {{{"),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_a_model_made_by_hand_is_refused_and_left_as_it_is(repository, folder, name):
    folder.mkdir(parents=True)
    versions, config = BY_HAND[name]
    make_by_hand(folder, *versions, config=config)
    before = tree(repository.path)
    with pytest.raises(Refused, match=r"made by hand .*\nchoose another `model` name"):
        plan(observe(repository, MODEL), wanted(files_of(1)))
    assert tree(repository.path) == before


def test_what_nothing_serves_does_not_stand_in_the_way(repository, folder):
    make_by_hand(folder, "02", "v3", config=None)
    (folder / "labels.txt").write_text("cat\n")
    before = tree(folder)
    todo = plan(observe(repository, MODEL), wanted(files_of(1)))
    assert "left as it is: labels.txt, which is nothing that enginehouse made" in str(todo)
    assert publish(repository, files_of(1)).version == 1
    after = tree(folder)
    assert {path: after[path] for path in before} == before


def test_a_version_put_beside_ours_by_hand_keeps_its_number(repository, folder):
    publish(repository, files_of(1))
    make_by_hand(folder, "5", config=None)
    assert publish(repository, files_of(2)).version == 6
    assert (folder / "5" / "model.onnx").read_bytes() == b"by hand"
    assert observe(repository, MODEL).listed == (1, 6)


def test_a_model_folder_that_is_a_link_is_refused(repository, folder, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    repository.path.mkdir()
    folder.symlink_to(elsewhere)
    with pytest.raises(Refused, match="symbolic link"):
        observe(repository, MODEL)
    assert list(elsewhere.iterdir()) == []


def test_a_config_that_is_a_link_is_somebody_elses(repository, folder, tmp_path):
    publish(repository, files_of(1))
    (folder / "config.pbtxt").rename(tmp_path / "shared.pbtxt")
    (folder / "config.pbtxt").symlink_to(tmp_path / "shared.pbtxt")
    with pytest.raises(Refused, match="made by hand"):
        plan(observe(repository, MODEL), wanted(files_of(2)))


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../a", "/a", "a\\b", ".hidden", "-x", "a b", "a\nb", "a\0b"])
def test_a_name_that_could_lead_out_of_the_repository_is_refused(repository, name):
    with pytest.raises(ConfigError, match="model: "):
        observe(repository, name)


def test_a_config_of_ours_that_was_spoilt_by_hand_is_refused_with_the_line(repository, folder):
    publish(repository, files_of(1))
    with (folder / "config.pbtxt").open("a") as file:
        file.write("max_batch: 3\n")
    line = config_text(folder).count("\n")
    with pytest.raises(Refused, match=rf"{folder}/config.pbtxt:{line}: .*`?max_batch.*\nit has been changed by hand"):
        observe(repository, MODEL)


WRONG_FILES = {
    "a cut file": ({"model.onnx": b"cut"}, "model.onnx: 3 bytes, wanted 20000"),
    "a file too many": ({"extra.bin": b"more"}, "extra.bin: 4 bytes, wanted no"),
}


@pytest.mark.parametrize("name", WRONG_FILES)
def test_files_that_are_not_the_artifacts_are_refused(repository, folder, name):
    change, expected = WRONG_FILES[name]
    publish(repository, files_of(1))
    before = {path: value for path, value in tree(repository.path).items() if path != MODEL}
    with pytest.raises(Refused, match="nothing was published") as caught:
        place_version(plan(observe(repository, MODEL), wanted(files_of(2))), source_of(files_of(2) | change))
    assert expected in str(caught.value)
    assert {path: value for path, value in tree(repository.path).items() if path != MODEL} == before


def test_an_error_of_the_copy_comes_through_and_leaves_nothing(repository):
    def source(folder: Path) -> None:
        source_of(files_of(1))(folder)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        place_version(plan(observe(repository, MODEL), wanted(files_of(1))), source)
    assert list(repository.path.iterdir()) == []


# Damage


def test_a_champion_whose_bytes_changed_is_replaced_by_a_new_version_and_not_kept(repository, folder):
    publish(repository, files_of(1))
    publish(repository, files_of(2))
    model = folder / "2" / "model.onnx"
    model.chmod(0o644)
    model.write_bytes(files_of(3)["model.onnx"])
    assert observe(repository, MODEL).damaged == {2: "has another model.onnx than was placed"}
    todo = publish(repository, files_of(2))
    assert (todo.version, todo.previous) == (3, 1)


@pytest.mark.parametrize("change", ["remove", "add"])
def test_a_version_with_other_files_than_were_placed_is_damaged(repository, folder, change):
    publish(repository, files_of(1))
    if change == "remove":
        (folder / "1" / "assets" / "vocabulary.txt").unlink()
    else:
        (folder / "1" / "assets" / "new.txt").write_text("x")
    assert "assets/" in observe(repository, MODEL).damaged[1]


def test_a_copied_repository_is_still_known(repository, tmp_path):
    publish(repository, files_of(1))
    shutil.copytree(repository.path, tmp_path / "copy", copy_function=shutil.copyfile)
    todo = plan(observe(Repository(tmp_path / "copy"), MODEL), wanted(files_of(1)))
    assert todo.steps == ()


def test_a_version_copied_under_another_number_is_foreign(repository, folder):
    publish(repository, files_of(1))
    shutil.copytree(folder / "1", folder / "3")
    assert observe(repository, MODEL).foreign == {"3": "has the provenance.json of digits 1"}
    assert publish(repository, files_of(2)).version == 4


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "cannot be read"),
        ("[]", "cannot be read"),
        ("{}", "without 'format'"),
        ('{"format": 99}', "has format 99, this enginehouse reads 1"),
    ],
)
def test_a_version_whose_provenance_says_nothing_is_foreign(repository, folder, text, why):
    publish(repository, files_of(1))
    publish(repository, files_of(2))
    (folder / "2" / "provenance.json").write_text(text)
    assert why in observe(repository, MODEL).foreign["2"]
    assert publish(repository, files_of(2)).version == 3


# The commit


def test_a_config_is_committed_only_over_the_one_that_was_planned_with(repository, folder):
    publish(repository, files_of(1))
    place_version(plan(observe(repository, MODEL), wanted(files_of(2))), source_of(files_of(2)))
    ours = plan(observe(repository, MODEL), wanted(files_of(2)))
    publish(repository, files_of(3))
    theirs = config_text(folder)
    with pytest.raises(Refused, match="somebody else published, released or edited\nrun again"):
        commit(ours)
    assert config_text(folder) == theirs
    assert names(folder) == ["1", "2", "3", "config.pbtxt"]


def test_a_config_that_lists_a_version_that_is_not_there_is_not_committed(repository, folder):
    publish(repository, files_of(1))
    before = tree(folder)
    with pytest.raises(ConfigError, match="version 2 does not exist"):
        commit_config(folder, with_versions(CONFIG, [1, 2]), replacing=config_text(folder))
    assert tree(folder) == before


def test_committing_leaves_no_other_name_and_replaces_the_file_whole(repository, folder):
    publish(repository, files_of(1))
    with (folder / "config.pbtxt").open() as old:
        publish(repository, files_of(2))
        assert old.read() == with_versions(CONFIG, [1]), "who reads the old one reads it to its end"
    assert names(folder) == ["1", "2", "config.pbtxt"]


def test_everything_is_on_the_disk_before_it_gets_its_name(repository, folder, monkeypatch):
    """Watches the real calls; what a power failure leaves cannot be tried here."""
    happened = []

    def sync(descriptor: int, real=os.fsync) -> None:
        happened.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        real(descriptor)

    def rename(old: Path, new: Path, real=Path.rename) -> Path:
        happened.append((old.name, new))
        return real(old, new)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(Path, "rename", rename)
    publish(repository, files_of(1))
    placed = happened.index(("version", folder / "1"))
    version = Path(next(path for path in happened if str(path).endswith("/provenance.json"))).parent
    for path in [".", "assets", *files_of(1), "provenance.json"]:
        assert version / path in happened[:placed]
    assert {repository.path, repository.path.parent} <= set(happened[:placed])
    assert happened[placed + 1] == folder
    committed = happened.index(("config.pbtxt", folder / "config.pbtxt"))
    assert happened[committed - 2].name == "config.pbtxt"
    assert happened[committed + 1] == folder


# Leftovers


def test_what_a_dead_publisher_left_is_cleared_and_what_a_live_one_holds_is_not(repository, folder):
    publish(repository, files_of(1))
    dead = folder / f".staging-{os.getpid()}-0a1b2c3d"
    (dead / "version").mkdir(parents=True)
    (dead / "version" / "model.onnx").write_bytes(b"half")
    others = [folder / ".staging", folder / ".staging-x-00", folder / ".stagings-1-00", folder / ".staging-1-zz"]
    for other in others:
        other.mkdir()
    (folder / ".staging-1-ff").write_text("a file")

    def source(to: Path) -> None:
        assert not dead.exists(), "leftovers go before anything is copied"
        live = to.parent
        assert observe(repository, MODEL).leftovers == ()
        assert clear_leftovers(folder) == ()
        assert live.exists()
        source_of(files_of(2))(to)

    todo = plan(observe(repository, MODEL), wanted(files_of(2)))
    assert todo.steps[0] == f"clear {dead.name}, left by a publisher that died"
    assert place_version(todo, source).version == 2
    assert all(other.exists() for other in others)
    assert (folder / ".staging-1-ff").exists()


def test_leftovers_alone_are_something_to_do(repository, folder):
    publish(repository, files_of(1))
    (folder / ".staging-1-00").mkdir()
    todo = plan(observe(repository, MODEL), wanted(files_of(1)))
    assert todo.steps == ("clear .staging-1-00, left by a publisher that died",)
    place_version(todo, source_of({}))
    assert names(folder) == ["1", "config.pbtxt"]


def test_a_number_taken_in_the_meantime_is_left_to_whom_it_is(repository, folder):
    publish(repository, files_of(1))

    def source(to: Path) -> None:
        publish(repository, files_of(3))
        make_by_hand(folder, "3", config=None)
        (folder / "4").write_text("a file of that name")
        source_of(files_of(2))(to)

    published = place_version(plan(observe(repository, MODEL), wanted(files_of(2))), source)
    assert published.version == published.provenance.version == 5
    assert json.loads((folder / "5" / "provenance.json").read_text())["version"] == 5
    assert (folder / "3" / "model.onnx").read_bytes() == b"by hand"
    assert (folder / "2" / "model.onnx").read_bytes() == files_of(3)["model.onnx"]


def test_a_version_that_another_publisher_placed_meanwhile_is_used(repository, folder):
    def source(to: Path) -> None:
        publish(repository, files_of(1))
        source_of(files_of(1))(to)

    assert place_version(plan(observe(repository, MODEL), wanted(files_of(1))), source).version == 1
    assert names(folder) == ["1", "config.pbtxt"]


# Processes of their own: killed, at once, without room


def run_trials(kind: str, repository: Repository, *, prefix: tuple[str, ...] = (), **env: str) -> dict:
    command = [*prefix, sys.executable, str(PROGRAM), kind, str(repository.path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, **env}, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_publisher_killed_at_random_instants_is_never_seen_half_done_and_its_rerun_converges(repository):
    result = run_trials("random", repository)
    assert result["killed"] == 40
    assert result["leftovers"] > 0, "else the kills came too late to prove anything"
    assert result["reader"]["wrong"] == []
    assert result["reader"]["looks"] > 100
    # 41 contents gave 41 versions, in order: no rerun placed twice what its killed run had placed.
    contents = [str(wanted(files_of(seed)).engine.content) for seed in range(41)]
    assert result["state"]["contents"] == {str(n): content for n, content in enumerate(contents, start=1)}
    assert result["state"]["listed"] == [40, 41]
    assert result["state"]["entries"] == sorted([*map(str, range(1, 42)), "config.pbtxt"])


@pytest.mark.parametrize("kind", ["first", "next"])
def test_a_publisher_killed_before_each_of_its_steps_leaves_nothing_half_done_and_its_rerun_converges(repository, kind):
    assert run_trials(kind, repository)["steps"] > 20


def test_publishers_at_once_get_versions_of_their_own_or_one_clear_refusal(repository):
    result = run_trials("race", repository)
    assert result["reader"]["wrong"] == []
    assert len(set(result["state"]["contents"].values())) == 20, "nobody's files were lost"
    assert result["state"]["wrong"] == []
    assert result["state"]["listed"][-1] == 20 or result["refused"] > 0


def test_publishers_of_the_same_content_at_once_get_one_version(repository):
    result = run_trials("same", repository)
    assert result["reader"]["wrong"] == []
    assert len(result["state"]["contents"]) == 5
    assert len(set(result["state"]["contents"].values())) == 5
    assert result["state"]["listed"] == [4, 5]
    assert result["state"]["entries"] == ["1", "2", "3", "4", "5", "config.pbtxt"]


def test_of_several_configs_that_would_replace_the_same_one_exactly_one_does(repository):
    assert run_trials("commits", repository)["codes"] == [[0, 9, 9, 9]] * 3


@pytest.fixture
def file_system_of_one_mebibyte(tmp_path) -> tuple[str, ...]:
    """What to put before a command so that it finds such a file system at `tmp_path / "small"`."""
    small = tmp_path / "small"
    small.mkdir()
    script = f'mount -t tmpfs -o size=1m none {shlex.quote(str(small))} && exec "$@"'
    prefix = ("unshare", "--map-root-user", "--mount", "sh", "-c", script, "sh")
    if (
        shutil.which("unshare") is None
        or subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode != 0
    ):
        pytest.skip("mounting a small file system needs user namespaces")
    return prefix


def test_without_room_nothing_changes_and_with_room_it_goes_on(tmp_path, file_system_of_one_mebibyte):
    result = run_trials("full", Repository(tmp_path / "small" / "models"), prefix=file_system_of_one_mebibyte)
    assert len(result["errors"]) == 3
    for error in result["errors"]:
        assert error.startswith("StoreUnusable: the model repository cannot be written: No space left on device: ")
        assert "make room and run again; nothing that is served has changed" in error
    assert result["state"]["listed"] == [1, 2]
    assert result["state"]["entries"] == ["1", "2", "config.pbtxt"]


def test_a_read_only_repository_can_be_looked_at_but_not_changed(tmp_path, file_system_of_one_mebibyte):
    remount = f"mount -o remount,ro {shlex.quote(str(tmp_path / 'small'))}"
    repository = Repository(tmp_path / "small" / "models")
    result = run_trials("read-only", repository, prefix=file_system_of_one_mebibyte, REMOUNT=remount)
    (error,) = result["errors"]  # what is published already needs no write
    assert error.startswith("StoreUnusable: the model repository cannot be written: Read-only file system: ")
    assert "name another `publish.repository`; nothing has changed" in error
    assert result["unchanged"]


def test_a_repository_that_others_own_is_not_changed():
    publish_all = {1: files_of(1), 2: files_of(2)}
    with tempfile.TemporaryDirectory() as root:
        Path(root).chmod(0o755)
        repository = Repository(Path(root) / "models")
        publish(repository, publish_all[1])
        before = tree(repository.path)
        repository.folder(MODEL).chmod(0o555)
        user = os.geteuid()
        try:
            if user == 0:
                os.seteuid(65534)
            with pytest.raises(StoreUnusable, match=r"Permission denied: .*\nmake it writable"):
                publish(repository, publish_all[2])
        finally:
            os.seteuid(user)
            repository.folder(MODEL).chmod(0o755)
        assert tree(repository.path) == before


def test_a_repository_that_is_a_file_is_unusable(tmp_path):
    (tmp_path / "models").write_text("not a folder")
    repository = Repository(tmp_path / "models")
    with pytest.raises(StoreUnusable):
        publish(repository, files_of(1))
    assert (tmp_path / "models").read_text() == "not a folder"


@pytest.mark.parametrize("place", ["models", "models/deeper"])
def test_a_repository_in_which_nothing_can_be_published_is_told_before_anything_is_built(tmp_path, place):
    (tmp_path / "models").write_text("not a folder")
    with pytest.raises(StoreUnusable, match=r"models is a file\n.*publish.repository"):
        require_usable(Repository(tmp_path / place), MODEL)
    require_usable(Repository(tmp_path / "not" / "there" / "yet"), MODEL)
    assert [path.name for path in tmp_path.iterdir()] == ["models"]


def test_a_repository_that_this_user_may_not_write_is_told_before_anything_is_built():
    with tempfile.TemporaryDirectory() as root:
        Path(root).chmod(0o555)
        user = os.geteuid()
        try:
            if user == 0:
                os.seteuid(65534)
            with pytest.raises(StoreUnusable, match=r"cannot be written: .* is read-only\n.*publish.repository"):
                require_usable(Repository(Path(root) / "models"), MODEL)
        finally:
            os.seteuid(user)


def test_the_model_of_another_pipeline_is_refused_though_its_champion_is_damaged(repository, folder):
    publish(repository, files_of(1))
    (folder / "1" / "model.onnx").unlink()
    taken = replace(wanted(files_of(2)), pipeline="others")
    with pytest.raises(Refused, match="is the model of pipeline numbers, whose champion others would replace"):
        plan(observe(repository, MODEL), taken)
    assert plan(observe(repository, MODEL), replace(taken, takes_over="numbers")).version == 2
