"""`approve: before_promote` where no Prefect server could suspend the run."""

from __future__ import annotations

import pytest

SETTINGS = ["--set", "train.max_epochs=3", "--set", "gates.metrics.accuracy.min=0.5"]
ASKING = [*SETTINGS, "--set", "approve=before_promote"]


@pytest.mark.slow
def test_a_run_in_a_terminal_stops_at_a_candidate_and_says_how_to_promote_it(workspace):
    first = workspace.report("run", workspace.pipeline("digits"), *ASKING)
    assert (first["state"], first["served"]) == ("built", None)
    assert [stage["stage"] for stage in first["stages"]][-1] == "publish"
    assert (first["release"]["name"], first["release"]["promoted"]) == ("digits/release@1", False)
    assert first["metrics"]["accuracy"].keys() >= {"pytorch", "staging"}
    again = workspace.enginehouse("run", workspace.pipeline("digits"), *ASKING)
    assert "releases promote digits/release@1" in again.stderr
    assert workspace.report("serve", "status") == []
    assert workspace.report("releases", "promote", "digits/release@1", "--reason", "seen")["state"] == "promoted"
    assert workspace.report("run", workspace.pipeline("digits"), *ASKING)["state"] == "unchanged"
