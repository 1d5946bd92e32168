"""The token without which an exposed server loads and unloads nothing: Triton's restricted API for `model-repository`.

Anybody who may load models may run code in the server (a model of the `python` backend is code). So whoever can reach
server's ports from elsewhere must not be able to. The token lies in a file of its own beside the server's record, and
in no record, log, argument list of ours or `docker inspect`.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
from pathlib import Path

KEY = "enginehouse-token"
"""The name of the HTTP header; gRPC's metadata key is `triton-grpc-protocol-` and this."""
VARIABLE = "ENGINEHOUSE_TRITON_TOKEN"
"""Where the token of servers that others run is taken from."""


def is_exposed(host: str) -> bool:
    """Whether a server at that address can be reached from other machines; a name counts as if it could."""
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host != "localhost"


def make_token(file: Path) -> str:
    """The token in `file`, which is made if it is not there."""
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return file.read_text().strip()
    with os.fdopen(descriptor, "w") as opened:
        opened.write(secrets.token_urlsafe(32))
    return file.read_text().strip()


def read_token(file: Path) -> str | None:
    """The token in `file`; None where there is no such file."""
    try:
        return file.read_text().strip()
    except FileNotFoundError:
        return None


def arguments(token: str) -> list[str]:
    """What tritonserver is given."""
    return [
        f"--http-restricted-api=model-repository:{KEY}={token}",
        f"--grpc-restricted-protocol=model-repository:{KEY}={token}",
    ]
