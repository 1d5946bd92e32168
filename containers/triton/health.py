"""The container's health: every released model is ready. Standard library only; exit status 0 or 1.

A server that is up and serves nothing is not healthy, unless nothing was released yet.
"""

from __future__ import annotations

import http.client
import sys
from pathlib import Path
from urllib.parse import quote

sys.path.insert(0, str(Path(__file__).resolve().parent))

from start import REPOSITORY, released


def is_ok(path: str) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", 8000, timeout=3)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def main() -> int:
    waiting = [] if is_ok("/v2/health/live") else ["the server"]
    waiting += [model for model in released(REPOSITORY) if not is_ok(f"/v2/models/{quote(model, safe='')}/ready")]
    if waiting:
        print("not ready:", ", ".join(waiting))  # noqa: T201 - shown by docker inspect
    return 1 if waiting else 0


if __name__ == "__main__":
    sys.exit(main())
