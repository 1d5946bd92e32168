"""What a run on a Prefect server has left for people: one Markdown page, for the summary of a CI job."""

from typing import Any

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId, ArtifactFilterType
from prefect.client.schemas.objects import FlowRun

from flows.operation.runs import described, state_of


def report(client: SyncPrefectClient, run: FlowRun) -> str | None:
    """The report that the run has published last; `None` where it did not come so far."""
    wanted = {
        "artifacts": ArtifactFilter(
            flow_run_id=ArtifactFilterFlowRunId(any_=[run.id]), type=ArtifactFilterType(any_=["markdown"])
        ).model_dump(mode="json"),
        "sort": "UPDATED_DESC",
    }
    found: list[dict[str, Any]] = client.request("POST", "/artifacts/filter", json=wanted).json()
    reports = [each for each in found if str(each["key"]).endswith("-report")]
    return _without_pictures(str(reports[0]["data"])) if reports else None


def summary(client: SyncPrefectClient, run: FlowRun, deployment: str) -> str:
    """How the run ended, where its page is, and its report."""
    state, told = state_of(run), described(run)
    lines = [f"**{deployment}: {state.name}** after {told['seconds']:.0f} s", ""]
    if told["page"]:
        lines += [f"[The run in Prefect]({told['page']})", ""]
    if state.message and not state.is_completed():
        lines += ["```", state.message, "```", ""]
    return "\n".join(lines) + (report(client, run) or "")


def _without_pictures(page: str) -> str:
    # The curves stand in the page itself, as tens of kilobytes that a job's summary does not show.
    return "\n".join(line for line in page.splitlines() if "](data:" not in line) + "\n"
