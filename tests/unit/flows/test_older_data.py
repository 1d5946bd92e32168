"""What an event brought in by overrides is not taken back by the next run on a schedule, which knows nothing of it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from flows.release import refuse_older_data
from tasks.artifacts import ArtifactStore, StageKey
from tasks.errors import Refused
from tasks.pipeline_file import load
from tasks.releases import record_promotion, record_release, standing
from tasks.served import Candidate, Verification


class House:
    """Releases of one pipeline, each trained on some version of its data."""

    def __init__(self, root):
        (root / "recipe.py").write_text("class Recipe:\n    outputs = ('y',)\n")
        self.file = root / "pipeline.yaml"
        self.file.write_text(
            'name: digits\nrecipe: recipe.py:Recipe\ndata: {rows: {version: "1"}}\n'
            "inputs: {x: {dtype: float32, shape: [4]}}\n"
        )
        self.store = ArtifactStore.open(root / "store")
        self.releases = 0

    def job(self, version, *overrides):
        return SimpleNamespace(
            pipeline=load(self.file),
            store=self.store,
            overrides=overrides,
            identity=SimpleNamespace(data={"rows": {"version": version}}),
        )

    def ask(self, version, *overrides):
        refuse_older_data(self.job(version, *overrides), standing(self.store, "digits"))

    def build(self, stage, data=None, materials=None):
        key = StageKey(
            stage=stage,
            version=1,
            materials={name: ref.content for name, ref in (materials or {}).items()},
            config={"number": self.releases},
            data=data or {},
        )
        with self.store.claim(key, pipeline="digits") as claim:
            (claim.product / "file").write_text(f"{stage} {self.releases}")
            return claim.commit(materials=materials or {})

    def release(self, version, *overrides):
        self.releases += 1
        train = self.build("train", {"rows": {"version": version}})
        products = {"engine": self.build("engine"), "triton_config": self.build("triton_config")}
        products["validate"] = self.build("validate", materials={"train": train})
        number = self.releases
        candidate = Candidate(
            model="digits",
            version=number,
            config=f"version_policy {{ specific {{ versions: [{number}] }} }}",
            validation=self.file.parent,
            expected={},
        )
        proven = Verification(metrics={}, slices={}, gates=())
        made = record_release(self.store, load(self.file), candidate, products, staging=proven, overrides=overrides)
        record_promotion(self.store, made, action="promote", live=proven, replicas=())


@pytest.fixture
def house(tmp_path):
    return House(tmp_path)


BROUGHT = "data.rows.version=2"


def test_a_run_that_says_nothing_of_the_data_that_an_event_brought_is_refused(house):
    house.release("1")
    house.release("2", BROUGHT)
    with pytest.raises(Refused) as refused:
        house.ask("1")
    text = str(refused.value)
    assert "digits/release@2, the champion, was trained with --set data.rows.version=2" in text
    assert f"write that into {house.file}" in text


def test_whoever_says_which_data_or_has_newer_is_let_through(house):
    house.ask("1")  # the first of all
    house.release("1")
    house.release("2", BROUGHT)
    house.ask("2", BROUGHT)
    house.ask("1", "data.rows.version=1")  # back, and meant so
    house.ask("2")  # the file says it by now
    house.ask("3")  # or something newer


def test_a_file_that_was_set_back_is_meant_so(house):
    house.release("1")
    house.release("2")
    house.ask("1")
