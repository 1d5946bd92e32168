"""A server that others can reach loads models only for whoever has the token, which is written down nowhere."""

from __future__ import annotations

import http.client
import json
import os
import sys
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from tasks.errors import NotReady
from tasks.toolchain import triton_client

TESTS = Path(__file__).parents[1]
_spec = spec_from_file_location("release_lab", TESTS / "release_lab.py")
release_lab = module_from_spec(_spec)
sys.modules["release_lab"] = release_lab
_spec.loader.exec_module(release_lab)


@pytest.mark.parametrize(
    ("kind", "deploy"),
    [
        ("process", "{kind: process, host: 0.0.0.0}"),
        pytest.param("docker", "{kind: docker, host: 0.0.0.0}", marks=pytest.mark.docker),
        # Published at the loopback address, and all the same within reach of every container of its network.
        pytest.param("docker", "{kind: docker}", marks=pytest.mark.docker),
    ],
)
def test_loading_needs_the_token_and_nobody_wrote_it_down(tmp_path, request, kind, deploy):
    if kind == "process":
        request.getfixturevalue("triton_installation")
    release_lab.no_proxy()
    lab = release_lab.Lab(tmp_path / "lab", deploy=deploy)
    try:
        lab.promote(lab.release(1))
        lab.promote(lab.release(2))
        assert lab.ask() == 2
        (replica,) = lab.target.observe()
        token = replica.address.token
        assert token is not None
        assert len(token) > 30
        for wrong in (None, "guessed"):
            stranger = replace(replica.address, token=wrong)
            with pytest.raises(NotReady):
                triton_client.unload(stranger, "adding")
            with pytest.raises(NotReady):
                triton_client.load(stranger, "adding")
            connection = http.client.HTTPConnection(stranger.host, stranger.http_port, timeout=10)
            connection.request("POST", "/v2/repository/models/adding/unload", "{}")
            assert connection.getresponse().status == 403
            connection.close()
        assert lab.ask() == 2
        kept = [path for path in lab.root.rglob("*") if path.is_file() and token.encode() in path.read_bytes()]
        assert [path.suffix for path in kept] == [".token"], kept
        assert all(path.stat().st_mode & 0o222 in (0, 0o200) for path in kept)
        if kind == "docker":
            assert token not in json.dumps(lab.target._containers()[0].attrs)
            assert oct(kept[0].parent.stat().st_mode & 0o777) == "0o700"
        else:
            assert kept[0].stat().st_mode & 0o077 == 0
            assert kept[0].stat().st_uid == os.getuid()
    finally:
        lab.stop()
