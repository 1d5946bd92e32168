"""Commands given what cannot be: one message that names the thing, and the exit status of its kind."""

import os
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from flows import cli
from flows.operation import runs
from flows.operation.api import connected
from flows.operation.notify import channel_of
from tasks.errors import ConfigError, NotReady
from tasks.home import VARIABLE, Home


def told(capsys, *arguments):
    """The exit status of a command, and its message."""
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    return ended.value.code, capsys.readouterr().err


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "home"))
    for name in [name for name in os.environ if name.startswith("PREFECT_")]:
        monkeypatch.delenv(name)
    return tmp_path / "home"


@pytest.mark.parametrize(
    "command", [("setup",), ("ls",), *((name, "1a2b") for name in ("show", "start", "resume", "cancel", "approve"))]
)
def test_runs_of_another_home_are_asked_for_by_its_folder(capsys, home, command, tmp_path):
    status, message = told(capsys, "runs", *command, "--home", str(tmp_path / "other"))
    assert status == 2
    assert f"no Prefect server is named, and for the home {tmp_path / 'other'} none is kept" in message


@pytest.mark.parametrize("command", [("up",), ("metrics", "serve")])
@pytest.mark.parametrize("port", ["0", "70000"])
def test_a_port_that_no_machine_has_is_refused(capsys, home, command, port):
    status, message = told(capsys, *command, "--port", port)
    assert status == 2
    assert f'"{port}" for --port' in message
    assert not home.exists()


@pytest.mark.parametrize("host", ["192.0.2.1", "nowhere.invalid"])
def test_an_address_that_is_not_this_machines_is_not_called_a_taken_port(capsys, host):
    status, message = told(capsys, "metrics", "serve", "--host", host)
    assert status == 2
    assert f"nothing can listen at {host}:9847" in message
    assert "--host" in message


def test_a_taken_port_of_the_exporter_is_refused_with_who_has_it(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        status, message = told(capsys, "metrics", "serve", "--port", str(taken.getsockname()[1]))
    assert status == 9
    assert f"(pid {os.getpid()})" in message


@pytest.mark.parametrize("name", ["digits", "", "train-to-deploy/digits/1"])
def test_a_deployment_is_named_by_flow_and_name(name):
    with pytest.raises(ConfigError, match="expected FLOW/NAME"):
        runs.start(None, name, {})  # no server is asked


def test_a_summary_without_an_end_to_tell_of_is_refused(capsys):
    status, message = told(capsys, "runs", "start", "a/b", "--no-follow", "--summary", "summary.md")
    assert status == 2
    assert "leave out --no-follow" in message
    assert not Path("summary.md").exists()


@pytest.mark.parametrize("url", ["https://", "http://[", "http:///path", "nonsense", "mailtos://"])
def test_an_address_without_a_host_is_no_address(url, caplog):
    with pytest.raises(ConfigError, match="nothing can be sent to"):
        channel_of(url)
    assert not caplog.records, "one message is enough"


def test_where_no_server_is_the_home_is_named_in_which_it_was_looked_for(capsys, home):
    status, message = told(capsys, "runs", "ls")
    assert status == 2
    assert str(home) in message


def test_a_home_that_is_a_file_is_named(capsys, home):
    home.write_text("")
    for command in (("runs", "ls"), ("up",)):
        status, message = told(capsys, *command)
        assert status == 8
        assert str(home) in message


class Health(BaseHTTPRequestHandler):
    """All that a Prefect server says before it is asked anything."""

    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"true")

    def log_message(self, *_):
        pass


def ask_when_it_is_gone(home, server):
    with connected(home) as client:
        server.shutdown()
        server.server_close()
        runs.find(client, "12345678")


def test_a_server_that_goes_away_under_a_command_is_named(home, monkeypatch):
    from prefect.settings import PREFECT_API_URL, temporary_settings

    with HTTPServer(("127.0.0.1", 0), Health) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/api"
        with (
            temporary_settings({PREFECT_API_URL: url}),
            pytest.raises(NotReady, match=f"{url} answers no more"),
        ):
            ask_when_it_is_gone(Home(home), server)


def test_numbers_of_a_home_in_which_nothing_ran_name_it_and_make_nothing(capsys, home):
    cli.main(["metrics", "print"])
    told = capsys.readouterr()
    assert "enginehouse_exporter_source_up" in told.out
    assert f"nothing ran yet in {home}" in told.err
    assert not home.exists()
