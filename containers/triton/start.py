"""Starts Triton in a container, serving what the mounted model repository says is released. Standard library only.

Explicit model control starts empty, so every model that enginehouse released is named with `--load-model`: read anew at
each start, a container that its restart policy brings back serves the champion, whatever was released since it was
made. A model that cannot be loaded keeps no other from being served (`--exit-on-error=false`), and keeps the container
unhealthy (health.py).

Whoever may load models runs code in the server, and other containers of the network reach it whatever address its ports
are published at. So that takes the token that lies in a mounted file; where none does, nobody can.

A container does not die with the process that made it, so one that shall is told so (ENGINEHOUSE_ENDS_WITH_STDIN): its
maker holds its standard input, which the Docker engine closes when the maker is gone, however it went.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import threading
from pathlib import Path

REPOSITORY = Path("/models")
MARK = "# Written by enginehouse"
TOKEN = Path("/run/secrets/enginehouse-token")
KEY = "enginehouse-token"


def released(repository: Path) -> list[str]:
    """The models with a config.pbtxt of ours, sorted."""
    found = []
    for folder in sorted(repository.iterdir()):
        try:
            with (folder / "config.pbtxt").open(encoding="utf-8", errors="replace") as file:
                if file.readline().startswith(MARK):
                    found.append(folder.name)
        except (FileNotFoundError, NotADirectoryError):
            continue
    return found


def arguments(repository: Path, token: str) -> list[str]:
    """The command line."""
    return [
        "tritonserver",
        *os.environ.get("ENGINEHOUSE_ARGUMENTS", "").split(),
        f"--model-repository={repository}",
        "--model-control-mode=explicit",
        *(f"--load-model={model}" for model in released(repository)),
        "--disable-auto-complete-config",
        "--exit-on-error=false",
        "--strict-readiness=true",
        f"--exit-timeout-secs={os.environ.get('ENGINEHOUSE_DRAIN_SECONDS', '10')}",
        # The network namespace is the container's own; what the world sees is decided where its ports are published.
        *(f"--{protocol}-address=0.0.0.0" for protocol in ("http", "grpc", "metrics")),
        f"--http-restricted-api=model-repository:{KEY}={token}",
        f"--grpc-restricted-protocol=model-repository:{KEY}={token}",
        *sys.argv[1:],
    ]


def main() -> None:
    token = TOKEN.read_text().strip() if TOKEN.is_file() else secrets.token_urlsafe(32)
    argv = arguments(REPOSITORY, token)
    # What a killed server of the same container left would fill the container's /dev/shm with every restart.
    for left in Path("/dev/shm").glob("triton_python_backend_shm_region_*"):  # noqa: S108
        left.unlink(missing_ok=True)
    if os.environ.get("ENGINEHOUSE_ENDS_WITH_STDIN"):
        sys.exit(serve_until_stdin_ends(argv))
    os.execvp(argv[0], argv)  # noqa: S606 - pid 1 becomes the server, which gets the stop signal


def serve_until_stdin_ends(argv: list[str]) -> int:
    """Run the server and end it, without a farewell, when nobody holds our standard input any more."""
    server = subprocess.Popen(argv, stdin=subprocess.DEVNULL)
    signal.signal(signal.SIGTERM, lambda *_: server.terminate())

    def watch() -> None:
        while os.read(0, 4096):
            pass
        server.kill()

    threading.Thread(target=watch, daemon=True).start()
    return server.wait()


if __name__ == "__main__":
    main()
