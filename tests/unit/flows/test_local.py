"""What the flow's own process does before Prefect is asked."""

import os
import socket
import subprocess
import sys

import pytest

from flows import local
from flows.operation import api, server
from tasks.errors import NotReady


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, "127.0.0.1,localhost,::1"),
        ({"NO_PROXY": "intern,localhost"}, "intern,localhost,127.0.0.1,::1"),
        ({"no_proxy": "a", "NO_PROXY": "b"}, "a,127.0.0.1,localhost,::1"),
        ({"no_proxy": "*"}, "*"),
    ],
)
def test_no_proxy_stands_between_the_flow_and_this_machine(before, after):
    environ = dict(before)
    local.without_proxy(environ)
    assert environ["no_proxy"] == after
    assert environ.get("NO_PROXY", after) == after


def test_a_prefect_server_that_does_not_answer_is_named(monkeypatch):
    from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

    with socket.socket() as taken:  # bound, and nobody listens
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/api"
        with (
            temporary_settings({PREFECT_API_URL: url, PREFECT_CLIENT_MAX_RETRIES: 0}),
            pytest.raises(NotReady, match=url),
        ):
            api.check_server()


def test_what_prefect_starts_takes_no_module_from_the_current_folder(tmp_path):
    for name in ("json", "tasks", "logging"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('mine')\n")
    environ = {**os.environ, **server.QUIET}
    command = [sys.executable, "-m", "uvicorn", "--version"]
    ended = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
