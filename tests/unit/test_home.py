"""Where the home is found."""

from tasks.home import find_home


def test_the_variable_wins(tmp_path, monkeypatch):
    monkeypatch.setenv("ENGINEHOUSE_HOME", str(tmp_path / "named"))
    assert find_home(tmp_path).root == tmp_path / "named"


def test_the_nearest_home_above_is_taken(tmp_path, monkeypatch):
    monkeypatch.delenv("ENGINEHOUSE_HOME", raising=False)
    (tmp_path / "a" / "b" / "c").mkdir(parents=True)
    (tmp_path / ".enginehouse").mkdir()
    assert find_home(tmp_path / "a" / "b" / "c").root == tmp_path / ".enginehouse"
    (tmp_path / "a" / ".enginehouse").mkdir()
    assert find_home(tmp_path / "a" / "b" / "c").root == tmp_path / "a" / ".enginehouse"


def test_a_checkout_has_its_home_at_its_top_and_any_other_folder_in_itself(tmp_path, monkeypatch):
    monkeypatch.delenv("ENGINEHOUSE_HOME", raising=False)
    (tmp_path / "checkout" / ".git").mkdir(parents=True)
    (tmp_path / "checkout" / "examples").mkdir()
    assert find_home(tmp_path / "checkout" / "examples").root == tmp_path / "checkout" / ".enginehouse"
    (tmp_path / "plain").mkdir()
    assert find_home(tmp_path / "plain").root == tmp_path / "plain" / ".enginehouse"
