"""An engine's passport: what built it and for what, and whether a server may load it."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.artifacts.digest import hash_file
from tasks.toolchain.triton_releases import TritonRelease, release_of_server
from tasks.toolchain.trtexec import PlanHeader, TrtexecOutput, parse_version, version_text


@dataclass(frozen=True, kw_only=True)
class ServerFacts:
    """What is known of a server that an engine shall go to; `None` where nobody could tell."""

    where: str
    """For a person: `the server at 127.0.0.1:8000 (Triton 2.72.0)`."""
    tensorrt: str | None = None
    compute_capabilities: tuple[str, ...] | None = None
    """Of the GPUs that it uses; empty for a server without one."""
    has_tensorrt: bool | None = None
    """Whether it has the backend that loads plans."""

    @classmethod
    def of(
        cls,
        where: str,
        *,
        server_version: str,
        compute_capabilities: Sequence[str] | None,
        has_tensorrt: bool | None = None,
    ) -> ServerFacts:
        """From Triton's own version (`2.72.0`), by the table of releases."""
        release = release_of_server(server_version)
        tensorrt = None if release is None or release.tensorrt is None else version_text(release.tensorrt)
        return cls(
            where=f"{where} (Triton {server_version})",
            tensorrt=tensorrt,
            compute_capabilities=None if compute_capabilities is None else tuple(compute_capabilities),
            has_tensorrt=has_tensorrt,
        )


def mismatches(passport: Mapping[str, Any], server: ServerFacts) -> list[str]:
    """Why `server` could not load the engine; empty if nothing known speaks against it. Both sides are named.

    What is not known of either is held against nobody: the staging server loads the engine before it is released.
    """
    found = []
    if passport.get("strip_weights"):
        found.append(f"the engine has no weights (engine.strip_weights), and {server.where} cannot add them")
    if server.has_tensorrt is False:
        found.append(
            f"the engine is a TensorRT plan, and {server.where} has no backend for plans, being the CPU server of "
            "`enginehouse serve setup`: put NVIDIA's tritonserver on the PATH, or deploy to a container of its image"
        )
    built, version_compatible = passport["tensorrt"], passport["version_compatible"]
    if built is not None and server.tensorrt is not None and built != server.tensorrt:
        ours, theirs = parse_version(built), parse_version(server.tensorrt)
        if not version_compatible:
            found.append(f"the engine is for TensorRT {built}, and {server.where} carries {server.tensorrt}")
        elif ours[0] != theirs[0] or ours > theirs:
            found.append(
                f"the engine is for TensorRT {built} and later {ours[0]}.x, "
                f"and {server.where} carries {server.tensorrt}"
            )
    capability, level = passport["compute_capability"], passport["hardware_compatibility"]
    for theirs_capability in server.compute_capabilities or ():
        if capability not in (None, theirs_capability) and not (
            level == "ampere+" and _number(theirs_capability) >= (8, 0)
        ):
            reach = " with hardware compatibility ampere+" if level == "ampere+" else ""
            found.append(
                f"the engine is for compute capability {capability}{reach} ({passport['gpu'] or 'no name'}), "
                f"and a GPU of {server.where} has {theirs_capability}"
            )
    if server.compute_capabilities == ():
        of = "" if capability is None else f" of compute capability {capability}"
        found.append(f"the engine needs a GPU{of}, and {server.where} has no GPU")
    return found


def _number(capability: str) -> tuple[int, int]:
    major, _, minor = capability.partition(".")
    return int(major), int(minor)


def make_passport(
    *,
    header: PlanHeader | None,
    output: TrtexecOutput,
    gpu: Mapping[str, str],
    release: TritonRelease | None,
    image: str | None,
    precision: str,
    strongly_typed: bool,
    profiles: Sequence[Mapping[str, Any]],
    hardware_compatibility: str,
    version_compatible: bool,
    strip_weights: bool,
    layers: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """The passport as it stands in the build record's details."""
    version = header.tensorrt if header is not None else output.version
    return {
        "tensorrt": None if version is None else version_text(version),
        "plan": None if header is None else header.to_json(),
        "compute_capability": output.device.get("compute_capability") or gpu.get("compute_capability"),
        "gpu": output.device.get("gpu") or gpu.get("gpu"),
        "driver": gpu.get("driver"),
        # That of the container. What else built it does not say which one it has.
        "cuda": None if release is None or image is None else release.cuda,
        "triton_release": None if release is None else release.name,
        "image": image,
        "precision": precision,
        "strongly_typed": strongly_typed,
        "profiles": list(profiles),
        "hardware_compatibility": hardware_compatibility,
        "version_compatible": version_compatible,
        "strip_weights": strip_weights,
        "layers": layers,
        "warnings": list(output.warnings),
    }


def layer_summary(information: Mapping[str, Any]) -> dict[str, Any]:
    """How many layers there are of each type, and in which data types they answer, from `--exportLayerInfo`.

    With less than detailed verbosity a layer is only its name.
    """
    layers = information.get("Layers") or []
    kinds: Counter[str] = Counter()
    types: Counter[str] = Counter()
    for layer in layers:
        if not isinstance(layer, Mapping):
            continue
        kinds[str(layer.get("LayerType", "unknown"))] += 1
        for output in layer.get("Outputs") or []:
            words = str(output.get("Format/Datatype", "")).split()
            types[words[0] if words else "unknown"] += 1
    return {
        "count": len(layers),
        "by_type": dict(sorted(kinds.items())),
        "outputs_by_datatype": dict(sorted(types.items())),
    }


def reproduce_script(command: Sequence[str], *, onnx: Path, plan: Path, timing: Path, what: str) -> str:
    """A shell script that runs the very command again on a copy of the graph, here or on another machine.

    The graph is checked by its digest first, since a plan tells nothing of what it was built from. `timing` is the
    folder of the timing cache, which is used where it can be: with it the builder chooses the same again.
    """
    places = {onnx: "onnx", plan: "plan", onnx.parent: "from", plan.parent: "to", timing: "timing"}
    lines = [
        "#!/bin/sh",
        f"# Builds {what} again.",
        "# usage: reproduce.sh PATH/TO/model.onnx (files with external weights beside it)   the plan: ./model.plan",
        "set -eu",
        'onnx=$(realpath "$1")',
        'plan=$(realpath -m "${2:-model.plan}")',
        'from=$(dirname "$onnx") to=$(dirname "$plan")',
        f"timing={shlex.quote(str(timing))}",
        '[ -w "$timing" ] || timing=$to',
        f'echo "{hash_file(onnx).hex}  $onnx" | sha256sum --check --quiet',
        " ".join(_replaced(argument, places) for argument in command),
        "",
    ]
    return "\n".join(lines)


def _replaced(argument: str, places: Mapping[Path, str]) -> str:
    """Quoted for the shell; the paths of the store, the work folder and the home become the script's own."""
    if not any(str(path) in argument for path in places):
        return shlex.quote(argument)
    known = {str(path): name for path, name in places.items()}
    either = "|".join(re.escape(path) for path in sorted(known, key=len, reverse=True))
    parts = re.split(f"({either})", argument)
    return "".join(f'"${{{known[part]}}}"' if part in known else _quoted(part) for part in parts)


def _quoted(text: str) -> str:
    return shlex.quote(text) if text else ""
