"""A pipeline whose releases take seconds: models that add a number, so that every answer says which one gave it.

The training is left out: engine, config and golden answers are put into the store as their stages would leave them.
Everything after that is the real thing: publishing, a staging server, live servers, records. Used by tests and by
`benchmarks/`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper
from safetensors.numpy import save_file

from flows.releases import Desk, candidate_of, open_desk, promote, retain, roll_back
from tasks import deploy, publish
from tasks.artifacts.record import ArtifactRef
from tasks.artifacts.store import ArtifactStore
from tasks.config import Pipeline
from tasks.events import Event
from tasks.home import Home
from tasks.pipeline_file import load
from tasks.releases import Release, record_promotion, record_release, used_versions
from tasks.served import Candidate, Verification, ask_golden
from tasks.targets import DeployTarget, target_of
from tasks.triton_config import Signature, model_config
from tasks.verify import staged

RECIPE = '''
"""A model that adds a number."""

import torch
from torch import nn


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return {"x": torch.tensor([index / 64])}, torch.tensor([index / 64])


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.number = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return x + self.number


class Offset:
    def __init__(self):
        self.total = self.seen = 0

    def update(self, outputs, targets):
        self.total += float((outputs["y"] - targets).sum())
        self.seen += len(targets)

    def result(self):
        return {"offset": self.total / self.seen}

    def slices(self, targets):
        return {"low": targets[:, 0] < 0.5, "high": targets[:, 0] >= 0.5}


class Adding:
    outputs = ("y",)

    def model(self):
        return Network()

    def train_data(self):
        return Rows()

    validation_data = test_data = train_data

    def loss(self, outputs, targets):
        return (outputs["y"] - targets)[:, 0] ** 2

    def metric(self):
        return Offset()
'''

PIPELINE = """
name: {name}
model: adding
recipe: recipe.py:Adding
data: {{rows: {{version: "1"}}}}
shapes: {{batch: {{min: 1, opt: 8, max: 16}}}}
inputs: {{x: {{dtype: float32, shape: [batch, 1]}}}}
serve: {{max_batch_size: 8}}
publish: {{repository: models, keep: {keep}, takes_over: {takes_over}}}
gates: {gates}
deploy: {deploy}
"""

SIGNATURE = {
    "inputs": [{"name": "x", "dtype": "float32", "shape": ["batch", 1]}],
    "outputs": [{"name": "y", "dtype": "float32", "shape": ["batch", 1]}],
}


def adding(number: float, *, broken: bool = False) -> bytes:
    """An ONNX model that adds `number`; a broken one names a file that is not there."""
    constant = helper.make_tensor("number", TensorProto.FLOAT, [1], [number])
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "number"], ["y"])],
        "adding",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 1])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 1])],
        [constant],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    data: bytes = model.SerializeToString()
    if broken:
        return data[: len(data) // 2]
    onnx.checker.check_model(model)
    return data


@dataclass
class Lab:
    """One pipeline `adding` in a folder, with a home and a model repository of its own."""

    root: Path
    deploy: str = "{kind: process}"
    gates: str = "{}"
    keep: int = 5
    name: str = "adding"
    """The pipeline's; its model is `adding`."""
    takes_over: str = "null"
    heard: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        (self.root / "recipe.py").write_text(RECIPE)
        self.configure()

    def configure(self) -> None:
        """Write the pipeline file anew."""
        fields = {f: getattr(self, f) for f in ("name", "deploy", "gates", "keep", "takes_over")}
        self.file.write_text(PIPELINE.format(**fields))
        self.__dict__.pop("pipeline", None)

    @property
    def file(self) -> Path:
        return self.root / "pipeline.yaml"

    @property
    def home(self) -> Home:
        return Home(self.root / "home")

    @cached_property
    def store(self) -> ArtifactStore:
        return ArtifactStore.open(self.home.store)

    @cached_property
    def pipeline(self) -> Pipeline:
        return load(self.file)

    @property
    def target(self) -> DeployTarget:
        return target_of(self.pipeline, self.home)

    @property
    def folder(self) -> Path:
        """The model's folder in the repository."""
        return self.root / "models" / "adding"

    @property
    def config(self) -> str:
        return (self.folder / "config.pbtxt").read_text()

    def desk(self, text: str | None = None) -> Desk:
        return open_desk(text or self.name, home=self.home.root, listener=self.heard.append)

    def products(self, number: float, *, broken: bool = False, max_batch_size: int = 8) -> dict[str, ArtifactRef]:
        """What the stages before a release would have left for a model that adds `number`."""
        made = self.root / "made" / f"{number}{'-broken' if broken else ''}-{max_batch_size}"
        files: dict[str, Callable[[Path], Any]] = {
            "engine": lambda f: (f / "model.onnx").write_bytes(adding(number, broken=broken)),
            "triton_config": lambda f: (f / "config.pbtxt").write_text(self.base_config(max_batch_size)),
            "validate": lambda f: write_validation(f, number),
        }
        refs = {}
        for stage, write in files.items():
            folder = made / stage
            if not folder.exists():
                folder.mkdir(parents=True)
                write(folder)
            refs[stage] = self.store.record(pipeline=self.name, stage=stage, content=folder)
        return refs

    def base_config(self, max_batch_size: int = 8) -> str:
        serve = self.pipeline.serve.model_copy(update={"max_batch_size": max_batch_size})
        return model_config(
            model="adding",
            platform="onnxruntime_onnx",
            signature=Signature.from_json(SIGNATURE),
            serve=serve,
            shapes=self.pipeline.shapes,
        )

    def release(self, number: float, *, max_batch_size: int = 8, stage: bool = False) -> Release:
        """Publish a model that adds `number` and record it: the candidate. With `stage` a staging server verifies it
        first; most tests ask something else, and leave that out."""
        products = self.products(number, max_batch_size=max_batch_size)
        source = partial(self.store.materialise, products["engine"])
        repository = publish.Repository(self.pipeline.repository)
        wanted = publish.Wanted(
            pipeline=self.name,
            model="adding",
            engine=products["engine"],
            files=self.store.content(products["engine"]).files,
            config=products["triton_config"],
            config_text=self.base_config(max_batch_size),
            actor="tester@here",
            takes_over=self.pipeline.publish.takes_over,
            used=used_versions(self.store, self.pipeline.repository),
        )
        plan = publish.plan(publish.observe(repository, "adding"), wanted)
        candidate = Candidate(
            model="adding",
            version=plan.version,
            config=plan.config_text,
            validation=self.store.path(products["validate"]),
            expected={},
        )
        proven = Verification(metrics={"offset": number}, gates=[])
        if stage:
            with staged(
                candidate,
                target=self.target,
                home=self.home,
                model_folder=plan.observed.folder,
                source=source,
            ) as (server, work):
                proven = Verification(
                    metrics={"offset": number},
                    gates=ask_golden(
                        server.address,
                        self.pipeline,
                        candidate,
                        runtime="staging",
                        work=work,
                        log=work / "log",
                        listener=self.heard.append,
                    ).gates,
                )
        publish.place_version(plan, source)
        return record_release(self.store, self.pipeline, candidate, products, staging=proven)

    def promote(self, release: Release, *, measure: bool = False, load_seconds: float = 120) -> None:
        """Make it the champion; without `measure` the golden answers are asked and the test data is not."""
        if measure:
            promote(self.desk(str(release.ref)))
            return
        observed = publish.observe(publish.Repository(self.pipeline.repository), "adding")
        live, replicas = deploy.move(
            self.pipeline,
            candidate_of(self.store, release),
            committed=observed.config,
            target=self.target,
            home=self.home,
            listener=self.heard.append,
            measure=False,
            load_seconds=load_seconds,
        )
        record_promotion(self.store, release, action="promote", live=live, replicas=replicas)
        retain(self.store, self.pipeline, self.target, self.heard.append)

    def roll_back(self, to: str | None = None) -> dict[str, Any]:
        return roll_back(self.desk(), to=to)

    def stop(self) -> None:
        self.target.stop()

    def ask(self, version: int | None = None, *, x: float = 0.5, server: int = 0) -> float:
        """One answer of a live server, less what was asked: the number that the model adds."""
        return answer(self.target.observe()[server].address.http_url, version, x=x) - x


def answer(url: str, version: int | None = None, *, x: float = 0.5) -> float:
    import urllib.request

    path = "/v2/models/adding" + (f"/versions/{version}" if version else "") + "/infer"
    asked = {"inputs": [{"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [x]}]}
    with urllib.request.urlopen(url + path, json.dumps(asked).encode(), timeout=30) as got:
        value: float = json.load(got)["outputs"][0]["data"][0]
    return value


def write_validation(folder: Path, number: float) -> None:
    x = np.array([[0.25], [-1.0], [3.5]], dtype=np.float32)
    save_file({"inputs.x": x, "outputs.y": x + np.float32(number)}, folder / "golden.safetensors")
    report = {"metrics": {"offset": {"pytorch": number}}, "parity": {}, "samples": 64}
    (folder / "report.json").write_text(json.dumps(report))
    request = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [0.25]}]}
    (folder / "request.json").write_text(json.dumps(request))


def no_proxy() -> None:
    """A proxy that the environment names is not for servers on this machine."""
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = "127.0.0.1,localhost"
