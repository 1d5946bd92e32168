"""The Dockerfiles as text: what can be said of those for GPUs without NVIDIA's registry, and that the variants agree.

The CPU images are built and run by `tests/integration/test_docker.py`; a GPU image shares their last stage but for its
base, and that is compared here.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

from tasks.toolchain.triton_releases import find_release

CONTAINERS = Path(__file__).parents[2] / "containers"
BASES = tomllib.loads((CONTAINERS / "bases.toml").read_text())
DOCKERFILES = sorted(CONTAINERS.glob("*/Dockerfile.*"))
GPU = [path for path in DOCKERFILES if path.suffix == ".gpu"]

Instructions = list[tuple[str, str]]


def instructions(path: Path) -> Instructions:
    """Every instruction with its words, as Docker reads them: comments dropped, lines joined."""
    text = re.sub(r"^\s*#.*\n", "", path.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    lines = (line.split(maxsplit=1) for line in text.splitlines() if line.strip())
    return [(verb, " ".join(words.split())) for verb, words in lines]


def last_stage(path: Path) -> Instructions:
    found = instructions(path)
    return found[max(place for place, (verb, _) in enumerate(found) if verb == "FROM") :]


def words_of(stage: Instructions, verb: str) -> Sequence[str]:
    return [words for each, words in stage if each == verb]


def named(path: Path) -> str:
    return f"{path.parent.name}{path.suffix}"


@pytest.mark.parametrize("path", DOCKERFILES, ids=named)
def test_every_image_runs_as_nobodys_root_stops_by_a_signal_and_says_what_it_is(path):
    stage = last_stage(path)
    assert words_of(stage, "USER") == ["10001:10001"]
    assert words_of(stage, "STOPSIGNAL") == ["SIGTERM"]
    assert json.loads(words_of(stage, "ENTRYPOINT")[0]), "the exec form, so that the signal reaches the program"
    labels = " ".join(words_of(stage, "LABEL"))
    assert "org.opencontainers.image.title=" in labels
    assert "org.opencontainers.image.licenses=" in labels
    last_of_root = max(place for place, (verb, _) in enumerate(stage) if verb in ("FROM", "COPY", "RUN"))
    assert last_of_root < [verb for verb, _ in stage].index("USER"), "nothing in the image belongs to who runs it"


@pytest.mark.parametrize("path", DOCKERFILES, ids=named)
def test_every_base_is_named_in_one_place_and_no_secret_or_network_is_in_the_build(path):
    found = instructions(path)
    assert {words.partition(" ")[0] for verb, words in found if verb == "FROM"} == {"${BASE}"}
    assert not any(verb == "ADD" for verb, _ in found), "it would fetch"
    for verb, words in found:
        assert not re.search(r"(?i)password|secret|token|index-url|https?://", words), f"{verb} {words}"
        if "pip install" in words:
            assert "--no-index" in words


@pytest.mark.parametrize("path", GPU, ids=named)
def test_the_base_of_a_gpu_image_has_a_registry_a_dated_tag_and_room_for_a_digest(path):
    base = BASES[f"{path.parent.name}-gpu"]
    assert base["image"].startswith("nvcr.io/nvidia/")
    assert re.fullmatch(r"[0-9]{2}\.[0-9]{2}-py3", base["tag"])
    assert re.fullmatch(r"(sha256:[0-9a-f]{64})?", base["digest"])


def test_the_servers_and_the_builders_base_are_of_one_release_that_the_table_knows():
    """An engine runs on the TensorRT that built it."""
    assert BASES["triton-gpu"]["tag"] == BASES["builder-gpu"]["tag"]
    release = find_release(BASES["triton-gpu"]["tag"])
    assert f"{BASES['triton-gpu']['image']}:{BASES['triton-gpu']['tag']}" == release.image


@pytest.mark.parametrize("image", ["triton", "trainer"])
def test_the_gpu_variant_ends_as_the_cpu_variant_does_which_is_built_and_run(image):
    ends = []
    for variant in ("cpu", "gpu"):
        stage = last_stage(CONTAINERS / image / f"Dockerfile.{variant}")
        kept = [(verb, words) for verb, words in stage if verb not in ("FROM", "LABEL", "RUN", "COPY")]
        # The CPU stand-in's own: where its parts lie, and how long a GPU server may take to start.
        kept = [(verb, re.sub(r"--start-period=\d+s", "", words)) for verb, words in kept]
        ends.append([(verb, words) for verb, words in kept if verb != "ENV" or image != "triton"])
    assert ends[0] == ends[1]


def test_the_health_of_a_server_is_its_models():
    for path in CONTAINERS.glob("triton/Dockerfile.*"):
        (health,) = words_of(last_stage(path), "HEALTHCHECK")
        script = Path(json.loads(health.partition("CMD ")[2])[-1])
        copied = " ".join(words_of(last_stage(path), "COPY"))
        assert f"triton/{script.name}" in copied
        assert f"{script.parent}/" in copied
