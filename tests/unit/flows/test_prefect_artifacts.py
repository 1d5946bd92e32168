"""What Prefect's pages are told; that they show it is seen in tests/integration/test_chain.py."""

import time
from types import SimpleNamespace

import pytest

from flows.operation import artifacts
from flows.operation.artifacts import TrainingProgress, key, task_run_name
from tasks.artifacts.digest import Digest
from tasks.artifacts.record import ArtifactRef
from tasks.stage import Outcome

DIGEST = Digest.of(b"")


@pytest.mark.parametrize(
    ("words", "made"),
    [(("digits", "report"), "digits-report"), (("My_Model.v2", "served"), "my-model-v2-served"), (("_a_",), "a")],
)
def test_a_key_has_lower_case_letters_digits_and_dashes(words, made):
    assert key(*words) == made


def outcome(state):
    artifact = ArtifactRef(pipeline="digits", stage="engine", number=3, record=DIGEST, content=DIGEST)
    return Outcome(stage="engine", state=state, artifact=artifact, seconds=1)


@pytest.mark.parametrize(
    ("result", "name"),
    [
        (outcome("built"), "engine: digits/engine@3 (built)"),
        (outcome("reused"), "engine: digits/engine@3 (reused)"),
        (("published", SimpleNamespace(version=7)), "engine: version 7 (published)"),
        (("reused", None), "engine (reused)"),
        (None, "engine"),
    ],
)
def test_a_task_run_is_named_after_what_came_out(result, name):
    assert task_run_name("engine", result) == name


class Recorded(TrainingProgress):
    """Shows nothing, and remembers what it would have shown."""

    def __init__(self):
        super().__init__("digits")
        self.shown = []

    def _show(self, event):
        self.shown.append(event["done"])


def event(done, stage="train", total=1000):
    return {"type": "progress", "stage": stage, "done": done, "total": total, "text": "", "metrics": {}}


def test_of_many_events_few_are_shown_and_the_last_one_is(monkeypatch):
    monkeypatch.setattr(artifacts, "BETWEEN_UPDATES", 0.05)
    monkeypatch.setattr(artifacts, "IDLE", 0.2)
    progress = Recorded()
    began = time.perf_counter()
    for done in range(1, 1001):
        progress(event(done))
    each = (time.perf_counter() - began) / 1000
    assert each < 0.001  # microseconds; a machine that is busy has some more
    progress(event(5, stage="export"))
    progress(event(5, total=0))
    deadline = time.monotonic() + 10
    while progress._running and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not progress._running  # the thread has ended by itself
    assert progress.shown[-1] == 1000
    assert len(progress.shown) <= 5
    progress(event(1000))  # and begins anew when something comes
    while len(progress.shown) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert progress.shown[-1] == 1000
