"""A kept Prefect server: runs find it, it tells of what ends badly, and it goes when it is told to."""

from __future__ import annotations

import http.server
import json
import os
import re
import signal
import socketserver
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from flows.operation import server
from flows.operation.notify import channel_of
from tasks.errors import ConfigError
from tasks.home import Home
from tasks.toolchain.processes import find_free_ports, start_time

pytestmark = pytest.mark.slow

ENGINEHOUSE = Path(sys.executable).with_name("enginehouse")

FIND = """
import sys
from pathlib import Path
from flows import local
wait = local.find_server(Path(sys.argv[1]), Path("unused.log"))
from prefect.settings import get_current_settings
wait()
print(get_current_settings().api.url)
"""

FAIL = """
import sys
from pathlib import Path
from flows.train_to_deploy import train_to_deploy
try:
    train_to_deploy(pipeline=Path(sys.argv[1]))
except Exception as error:
    print(type(error).__name__)
"""


class User:
    """Somebody in a folder of theirs, whose home keeps a server."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir()
        self.home = Home(root / ".enginehouse")
        self.home.root.mkdir()
        (self.port,) = find_free_ports(1)
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "ENGINEHOUSE_"))}
        self.environment = clean | {"PREFECT_HOME": str(root / "prefect-home")}

    def enginehouse(self, *arguments: object) -> list | dict:
        done = subprocess.run(
            [str(ENGINEHOUSE), *map(str, arguments), "--json"],
            cwd=self.root,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)

    def python(self, program: str, **environment: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", program, str(self.root / "pipeline.yaml")],
            cwd=self.root,
            env=self.environment | environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip().splitlines()[-1]


@pytest.fixture(scope="module")
def user(tmp_path_factory):
    made = User(tmp_path_factory.mktemp("watch") / "user")
    first = made.enginehouse("up", "--worker", "--port", made.port)
    assert first["started"]
    yield made
    ended = made.enginehouse("down")
    assert sorted(each["name"] for each in ended) == ["server", "worker"]
    assert not any(start_time(each["pid"]) == each["start_time"] for each in ended)
    assert made.enginehouse("down") == []


def test_up_twice_is_up_once(user):
    before = [server.kept(user.home, name) for name in ("server", "worker")]
    again = user.enginehouse("up")
    assert not again["started"]
    assert [each["pid"] for each in again["processes"]] == [each.pid for each in before]


def test_its_ui_knows_its_own_address(user):
    url = f"http://127.0.0.1:{user.port}"
    with urllib.request.urlopen(f"{url}/ui-settings", timeout=10) as answer:
        assert json.load(answer)["api_url"] == f"{url}/api"
    with urllib.request.urlopen(url, timeout=10) as answer:
        assert b"<html" in answer.read()


def test_a_run_finds_it_unless_another_one_is_named(user):
    assert user.python(FIND) == f"http://127.0.0.1:{user.port}/api"
    named = f"http://localhost:{user.port}/api"
    assert user.python(FIND, PREFECT_API_URL=named) == named


def test_a_worker_that_died_is_started_again_and_the_server_is_left_alone(user):
    kept, worker = server.kept(user.home), server.kept(user.home, "worker")
    os.kill(worker.pid, signal.SIGKILL)
    deadline = time.monotonic() + 20
    while server.kept(user.home, "worker") is not None and time.monotonic() < deadline:
        time.sleep(0.05)
    again = user.enginehouse("up", "--worker")
    assert again["started"]
    assert server.kept(user.home) == kept
    assert server.kept(user.home, "worker").pid != worker.pid


class Webhook(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.server.got.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        pass


class Mailbox(socketserver.StreamRequestHandler):
    """As much of a mail server as it takes to get one message."""

    def handle(self) -> None:
        self.wfile.write(b"220 here\r\n")
        for line in self.rfile:
            word = line.split()[0].upper()
            if word == b"DATA":
                self.wfile.write(b"354 go on\r\n")
                text = b"".join(iter(self.rfile.readline, b".\r\n"))
                self.server.got.append(text.decode())
            self.wfile.write(b"221 bye\r\n" if word == b"QUIT" else b"250 ok\r\n")
            if word == b"QUIT":
                return


@contextmanager
def listening(handler: type) -> Iterator[socketserver.TCPServer]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), handler) as listener:
        listener.got = []
        threading.Thread(target=listener.serve_forever, daemon=True).start()
        yield listener
        listener.shutdown()


def test_a_webhook_gets_subject_and_text():
    with listening(Webhook) as hook:
        channel_of(f"http://127.0.0.1:{hook.server_address[1]}/").notify("why", subject="what")
        assert hook.got == [{"subject": "what", "body": "why"}]


def test_an_address_that_nothing_can_be_sent_to_is_refused_without_being_repeated():
    with pytest.raises(ConfigError) as refused:
        channel_of("nonsense://user:secret@host")
    assert "secret" not in str(refused.value)


def test_a_run_that_fails_is_told_once_to_the_address_that_was_named_last(user):
    with listening(Webhook) as hook, listening(Mailbox) as mail:
        names = user.enginehouse("notify", f"http://127.0.0.1:{hook.server_address[1]}/")
        address = f"127.0.0.1:{mail.server_address[1]}?from=runs@example.com&to=ann@example.com&mode=insecure"
        assert user.enginehouse("notify", f"mailto://{address}") == names
        assert user.python(FAIL, PREFECT_API_URL=f"http://127.0.0.1:{user.port}/api") == "ConfigError"
        deadline = time.monotonic() + 60
        while not mail.got:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        time.sleep(1)  # another message would have come by now
        assert len(mail.got) == 1
        assert hook.got == []
        assert re.search(r"train-to-deploy of \w+: Failed", mail.got[0])
        assert "pipeline.yaml" in mail.got[0]
    assert user.enginehouse("notify", "--remove") == names


def test_the_exporter_counts_its_flow_runs(user):
    assert user.python(FAIL, PREFECT_API_URL=f"http://127.0.0.1:{user.port}/api") == "ConfigError"
    done = subprocess.run(
        [str(ENGINEHOUSE), "metrics", "print"],
        cwd=user.root,
        env=user.environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    counted = re.search(r'enginehouse_prefect_flow_runs{flow="train-to-deploy",state="failed"} (\d+)\.0', done.stdout)
    assert counted
    assert int(counted[1]) >= 1
    assert 'enginehouse_exporter_source_up{source="prefect"} 1.0' in done.stdout
