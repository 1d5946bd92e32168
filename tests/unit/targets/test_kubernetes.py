"""Kubernetes manifests: reviewed files, valid by Kubernetes' own schemas."""

from __future__ import annotations

from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from tasks.errors import ConfigError
from tasks.targets.kubernetes import Unit, inference_service, manifests, object_name, to_yaml

GOLDEN = Path(__file__).parents[2] / "golden" / "kubernetes"
IMAGE = "registry.example.org/digits@sha256:" + "ab" * 32


def unit(**changes) -> Unit:
    fields = {
        "name": "digits",
        "image": IMAGE,
        "model": "digits",
        "version": 3,
        "release": "digits/release@4",
        "record": "sha256:" + "cd" * 32,
        "config": '# Written by enginehouse\nname: "digits"\nversion_policy { specific { versions: [2, 3] } }\n',
    }
    return Unit(**{**fields, **changes})


RENDERED = {
    "plain.yaml": manifests(unit()),
    "gpu.yaml": manifests(unit(gpus=1, replicas=4)),
    "kserve.yaml": inference_service(unit(), canary_percent=10),
}


@pytest.mark.parametrize("name", RENDERED)
def test_the_manifests_are_the_reviewed_ones(name):
    assert to_yaml(RENDERED[name]) == (GOLDEN / name).read_text()


@pytest.mark.parametrize("name", ["plain.yaml", "gpu.yaml"])
@pytest.mark.parametrize("version", ["1.29", "1.34"])
def test_they_are_valid_by_kubernetes_own_schemas(name, version):
    for each in yaml.safe_load_all((GOLDEN / name).read_text()):
        kubernetes_validate.validate(each, version, strict=True)


def test_the_pod_of_the_inference_service_is_a_valid_pod():
    """KServe's own schema is in no package; its predictor holds the fields of a pod, which are checked as one. The two
    of its own are those of `V1beta1PredictorSpec` in KServe's SDK 0.21, compared by hand."""
    predictor = dict(RENDERED["kserve.yaml"][0]["spec"]["predictor"])
    for own in ("minReplicas", "canaryTrafficPercent"):
        predictor.pop(own)
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "digits"}, "spec": predictor}
    kubernetes_validate.validate(pod, "1.34", strict=True)


def test_ready_means_the_model():
    (_, deployment, *_) = manifests(unit())
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    for probe in ("readinessProbe", "startupProbe"):
        assert container[probe]["httpGet"]["path"] == "/v2/models/digits/ready"


@pytest.mark.parametrize("image", ["digits:latest", "digits", "digits@sha256:ab"])
def test_an_image_without_a_digest_is_refused(image):
    with pytest.raises(ConfigError, match="names no digest"):
        unit(image=image)


@pytest.mark.parametrize(
    ("text", "name"), [("Digits_v2.1", "digits-v2-1"), ("7up", "m-7up"), ("a" * 80, "a" * 53), ("x-", "x")]
)
def test_names_are_those_that_kubernetes_takes(text, name):
    assert object_name(text) == name
