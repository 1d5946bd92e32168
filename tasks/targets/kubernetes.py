"""Kubernetes manifests for a release that was baked into an image: rendered, not applied.

Pure. Two forms: plain objects (Deployment, Service, PodDisruptionBudget, ConfigMap), or KServe's InferenceService,
which brings the weighted canary that plain Kubernetes has not. The image holds server, versions and config, so a
rollout is a change of its digest, and going back is `kubectl rollout undo`, or the manifests of the release before.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tasks.errors import ConfigError, Problem

PORTS = {"http": 8000, "grpc": 8001, "metrics": 8002}
DRAIN_SECONDS = 10
"""Triton's `--exit-timeout-secs` in our images."""


@dataclass(frozen=True, kw_only=True)
class Unit:
    """What is to run."""

    name: str
    """The objects' name."""
    image: str
    """With its digest, so that what was verified is what runs."""
    model: str
    version: int
    release: str
    """Such as `digits/release@3`."""
    record: str
    """The digest of the release's record."""
    config: str
    """The whole text of `config.pbtxt`."""
    replicas: int = 2
    cpu: str = "1"
    memory: str = "1Gi"
    gpus: int = 0

    def __post_init__(self) -> None:
        if not re.fullmatch(r".+@sha256:[0-9a-f]{64}", self.image):
            raise ConfigError(
                Problem(
                    f"{self.image} names no digest, so what runs would not be known to be what was verified",
                    hint="take the one that `enginehouse releases bake --push` printed: NAME@sha256:…",
                )
            )


def object_name(text: str) -> str:
    """A name that Kubernetes takes: lower-case letters, digits and dashes, at most 53 of them."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:53].rstrip("-")
    return name if name and name[0].isalpha() else f"m-{name}"


def manifests(unit: Unit) -> list[dict[str, Any]]:
    """ConfigMap, Deployment, Service and PodDisruptionBudget."""
    selector = {"app.kubernetes.io/name": unit.name}
    return [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": _metadata(unit, f"{unit.name}-release"),
            # For people and for audits: what runs reads the same bytes in its image.
            "data": {"release": unit.release, "record": unit.record, "config.pbtxt": unit.config},
        },
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": _metadata(unit, unit.name),
            "spec": {
                "replicas": unit.replicas,
                "selector": {"matchLabels": selector},
                # None is taken away before its successor has the model ready.
                "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
                "template": {
                    "metadata": {"labels": {**selector, **_labels(unit)}, "annotations": _annotations(unit)},
                    "spec": _pod(unit),
                },
            },
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": _metadata(unit, unit.name),
            "spec": {
                "selector": selector,
                "ports": [{"name": name, "port": port, "targetPort": name} for name, port in PORTS.items()],
            },
        },
        {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": _metadata(unit, unit.name),
            "spec": {"maxUnavailable": 1, "selector": {"matchLabels": selector}},
        },
    ]


def inference_service(unit: Unit, *, canary_percent: int | None = None) -> list[dict[str, Any]]:
    """KServe's InferenceService; with `canary_percent`, that share of the traffic goes to this release."""
    pod = _pod(unit)
    (container,) = pod.pop("containers")
    container["name"] = "kserve-container"
    predictor: dict[str, Any] = {"minReplicas": unit.replicas, "containers": [container], **pod}
    if canary_percent is not None:
        predictor["canaryTrafficPercent"] = canary_percent
    return [
        {
            "apiVersion": "serving.kserve.io/v1beta1",
            "kind": "InferenceService",
            "metadata": _metadata(unit, unit.name),
            "spec": {"predictor": predictor},
        }
    ]


def to_yaml(objects: Sequence[Mapping[str, Any]]) -> str:
    """The objects as one YAML file; equal objects give equal bytes."""
    import yaml

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            del data
            return True

    dumped = (yaml.dump(dict(each), Dumper=Dumper, sort_keys=False, width=120) for each in objects)
    return "".join(f"---\n{each}" for each in dumped)


def _metadata(unit: Unit, name: str) -> dict[str, Any]:
    return {
        "name": name,
        "labels": {"app.kubernetes.io/name": unit.name, **_labels(unit)},
        "annotations": _annotations(unit),
    }


def _labels(unit: Unit) -> dict[str, str]:
    return {"app.kubernetes.io/managed-by": "enginehouse", "app.kubernetes.io/version": str(unit.version)}


def _annotations(unit: Unit) -> dict[str, str]:
    return {"enginehouse.org/release": unit.release, "enginehouse.org/record": unit.record}


def _pod(unit: Unit) -> dict[str, Any]:
    ready = {"httpGet": {"path": f"/v2/models/{unit.model}/ready", "port": "http"}}
    limits = {"memory": unit.memory} | ({"nvidia.com/gpu": str(unit.gpus)} if unit.gpus else {})
    return {
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 10001,
            "runAsGroup": 10001,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        # Twice: for requests that still come while the endpoints are told, and for those under way.
        "terminationGracePeriodSeconds": 3 * DRAIN_SECONDS,
        "containers": [
            {
                "name": "triton",
                "image": unit.image,
                "ports": [{"name": name, "containerPort": port} for name, port in PORTS.items()],
                # Ready means the model, not the server: traffic comes when it can be answered.
                "readinessProbe": {**ready, "periodSeconds": 2, "failureThreshold": 2},
                "startupProbe": {**ready, "periodSeconds": 2, "failureThreshold": 90},
                "livenessProbe": {
                    "httpGet": {"path": "/v2/health/live", "port": "http"},
                    "periodSeconds": 10,
                    "failureThreshold": 3,
                },
                "lifecycle": {"preStop": {"exec": {"command": ["sleep", "5"]}}},
                "resources": {"requests": {"cpu": unit.cpu, "memory": unit.memory}, "limits": limits},
                "securityContext": {
                    "allowPrivilegeEscalation": False,
                    "readOnlyRootFilesystem": True,
                    "capabilities": {"drop": ["ALL"]},
                },
                "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}, {"name": "shm", "mountPath": "/dev/shm"}],  # noqa: S108
            }
        ],
        "volumes": [
            {"name": "tmp", "emptyDir": {"sizeLimit": "64Mi"}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "256Mi"}},
        ],
    }
