"""Runs on a Prefect server, as far as that needs none."""

from __future__ import annotations

import logging

import pytest
from prefect.client.schemas.objects import StateType
from prefect.events.schemas.events import RelatedResource
from prefect.states import Cancelled, Completed, Crashed, Failed

from flows.operation.approval import rejected
from flows.operation.log import without_tracebacks
from flows.operation.retries import passes
from flows.operation.runs import in_states, raised
from flows.operation.setup import FLOWS, dead_runs
from flows.release_flows import ls, pin, promote, repair, rollback, show
from flows.train_to_deploy import train_to_deploy
from flows.upkeep import check_drift, gc
from tasks import errors
from tasks.errors import CommandFailed, ConfigError, EnginehouseError, GateFailed, NotReady, Refused, Rejected


def failed(ended, cause=None):
    return CommandFailed("training", argv=["x"], ended=ended, cause=cause)


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (NotReady("no Triton server answers"), True),
        (NotReady("could not load", passes=False), False),
        (failed("killed by SIGKILL"), True),
        (failed("supervisor killed"), True),
        (failed("exit status 1", "a port is in use by another process"), True),
        (failed("killed by SIGKILL", "out of memory: the kernel killed a process"), False),
        (failed("exit status 1"), False),
        (failed("deadline of 60 s passed"), False),
        (failed("cancelled"), False),
        (failed("could not start", "it could not be started: no such file"), False),
        (ConfigError("wrong"), False),
        (GateFailed("not good enough"), False),
        (Refused("it would overwrite"), False),
        (Rejected("no"), False),
        (ValueError("an error of programming"), False),
    ],
    ids=str,
)
def test_only_what_may_pass_by_itself_is_tried_again(error, again):
    assert passes(error) is again


def of_the_tree(kind=EnginehouseError):
    return [kind, *(below for each in kind.__subclasses__() for below in of_the_tree(each))]


@pytest.mark.parametrize(
    "kind", [k for k in of_the_tree() if k.__module__ == errors.__name__], ids=lambda k: k.__name__
)
def test_the_error_that_a_run_ended_with_keeps_its_kind_and_exit_status(kind):
    state = Failed(message=f"Flow run encountered an exception: {kind.__name__}: what happened\nthe mend")
    told = raised(state)
    assert told is not None
    assert (told.kind, told.exit_status, str(told)) == (kind.kind, kind.exit_status, "what happened\nthe mend")


def test_a_rejection_is_told_as_such():
    state = rejected(Rejected("digits/release@2 was rejected by a tester"))
    told = raised(state)
    assert (state.name, told.kind, told.exit_status) == ("Rejected", Rejected.kind, Rejected.exit_status)
    assert str(told) == "digits/release@2 was rejected by a tester"


@pytest.mark.parametrize("run", ["prefect.flow_runs", "prefect.task_runs"])
def test_the_log_of_a_run_tells_our_errors_without_a_traceback_and_others_with_one(run):
    without_tracebacks()

    def told(error: Exception) -> str:
        text, info = "Encountered exception: %r - and so it ended", (type(error), error, None)
        record = logging.LogRecord(run, logging.ERROR, __file__, 1, text, (error,), info)
        assert logging.getLogger(run).filter(record)
        return logging.Formatter().format(record)

    assert told(ConfigError("no such recipe\nname another")) == (
        "Encountered exception: ConfigError: no such recipe\nname another - and so it ended"
    )
    assert told(KeyError("oops")).endswith("and so it ended\nKeyError: 'oops'")


def test_what_ended_otherwise_has_status_1_and_its_states_name():
    assert raised(Completed()) is None
    for state, kind in (
        (Crashed(message="gone"), "crashed"),
        (Cancelled(), "cancelled"),
        (Failed(message="x"), "failed"),
    ):
        told = raised(state)
        assert told is not None
        assert (told.kind, told.exit_status) == (kind, 1)
    told = raised(Failed(message="Flow run encountered an exception: ValueError: programming"))
    assert told is not None
    assert told.exit_status == 1


def test_a_state_picks_runs_by_its_name_or_by_its_type_and_a_rejected_run_is_no_failed_one():
    picked = in_states(["failed", "Suspended", "running"])
    assert picked.type.any_ == [StateType.RUNNING]
    assert picked.name.any_ == ["Failed", "TimedOut", "Suspended"]
    assert in_states(["rejected"]).name.any_ == ["Rejected"]
    with pytest.raises(ConfigError, match=r"no state done \(one of .*, failed,"):
        in_states(["done"])


def test_only_runs_of_our_flows_are_ever_marked_as_dead():
    def is_ours(flow):
        related = {
            "prefect.resource.id": "prefect.flow.1",
            "prefect.resource.role": "flow",
            "prefect.resource.name": flow,
        }
        return dead_runs().trigger.match_related.includes([RelatedResource.model_validate(related)])

    assert is_ours("train-to-deploy")
    assert not is_ours("somebody-elses")
    assert {flow.name for flow in (train_to_deploy, gc, check_drift, ls, show, promote, rollback, pin, repair)} == {
        *FLOWS
    }
