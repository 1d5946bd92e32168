"""`enginehouse releases` for `prefect deployment run`: flows `ls`, `show`, `promote`, `rollback`, `pin`, `repair`."""

import json
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger
from prefect.artifacts import create_table_artifact

from flows import releases
from flows.operation.artifacts import key
from flows.operation.log import logged, without_tracebacks
from flows.parameters import Reason, ReleaseName
from flows.releases import Desk, open_desk


@flow(name="ls", flow_run_name="releases of {release}", persist_result=False)
def ls(release: ReleaseName, home: Path | None = None) -> list[dict[str, Any]]:
    """List a pipeline's releases, oldest first, in the log and as a table among the run's artifacts.

    Parameters:
        release: a pipeline's name or file
        home: the folder with the store; found from the pipeline file or the current folder if left out
    """
    rows = releases.listing(_desk(release, home))
    for row in rows:
        get_run_logger().info("%s: %s", row["release"], row["state"])
    _keep_table(f"releases-of-{release}", [{name: str(row[name]) for name in row} for row in rows])
    return rows


@flow(name="show", flow_run_name="show {release}", persist_result=False)
def show(release: ReleaseName, home: Path | None = None) -> dict[str, Any]:
    """Tell what exactly a release is, from which data and code, and proven by which numbers.

    Parameters:
        release: a release such as `digits/release@3`; or a pipeline's name or file, for its champion
        home: the folder with the store; found from the pipeline file or the current folder if left out
    """
    shown = releases.describe(_desk(release, home))
    get_run_logger().info(json.dumps(shown, indent=2))
    _keep_table(f"shown-{shown['release']}", [{"what": name, "is": str(value)} for name, value in shown.items()])
    return shown


@flow(name="promote", flow_run_name="promote {release}", persist_result=False)
def promote(release: ReleaseName, reason: Reason | None = None, home: Path | None = None) -> dict[str, Any]:
    """Make a verified release the champion; the servers are moved one by one.

    Parameters:
        release: a release such as `digits/release@3`; or a pipeline's name or file, for its candidate
        reason: why; kept with the record
        home: the folder with the store; found from the pipeline file or the current folder if left out
    """
    return releases.promote(_desk(release, home), reason=reason)


@flow(name="rollback", flow_run_name="roll back {release}", persist_result=False)
def rollback(
    release: ReleaseName, to: ReleaseName | None = None, reason: Reason | None = None, home: Path | None = None
) -> dict[str, Any]:
    """Go back to the champion before the champion: its versions, and its configuration to the byte.

    Parameters:
        release: a pipeline's name or file; or the release to go back to
        to: the release to go back to, by name or number, where `release` names the pipeline
        reason: why; kept with the record
        home: the folder with the store; found from the pipeline file or the current folder if left out
    """
    return releases.roll_back(_desk(release, home), to=to, reason=reason)


@flow(name="pin", flow_run_name="pin {release}", persist_result=False)
def pin(release: ReleaseName, remove: bool = False, home: Path | None = None) -> dict[str, Any]:
    """Keep a release's versions in the repository for good.

    Parameters:
        release: a release such as `digits/release@3`; or a pipeline's name, for its champion
        remove: let retention have it again
        home: the folder with the store; found from the current folder if left out
    """
    return releases.set_pin(_desk(release, home), remove=remove)


@flow(name="repair", flow_run_name="repair {release}", persist_result=False)
def repair(release: ReleaseName, home: Path | None = None) -> dict[str, Any]:
    """Finish or undo what a process that died has left half done.

    Parameters:
        release: a pipeline's name or file
        home: the folder with the store; found from the pipeline file or the current folder if left out
    """
    return releases.repair(_desk(release, home))


def _desk(text: str, home: Path | None) -> Desk:
    without_tracebacks()
    return open_desk(text, home=home, listener=logged(get_run_logger()))


def _keep_table(name: str, rows: list[dict[str, Any]]) -> None:
    create_table_artifact(key=key(name), table=rows)
