"""Whether a server may load an engine: by what the passport and the server say, and by nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tasks.engines.passport import ServerFacts, layer_summary, mismatches

PASSPORT = {
    "tensorrt": "10.16.1",
    "compute_capability": "8.0",
    "gpu": "NVIDIA A100",
    "hardware_compatibility": "none",
    "version_compatible": False,
}


def server(tensorrt="10.16.1", gpus=("8.0",)):
    return ServerFacts(where="the server at host:8000", tensorrt=tensorrt, compute_capabilities=gpus)


FITS = {
    "the same": ({}, server()),
    "a server that tells nothing": ({}, server(None, None)),
    "ampere+ on a later generation": ({"hardware_compatibility": "ampere+"}, server(gpus=("9.0",))),
    "a version compatible plan in a later release": ({"version_compatible": True}, server("10.17.0")),
}
DOES_NOT_FIT = {
    "another TensorRT": ({}, server("11.2.1"), ["TensorRT 10.16.1", "carries 11.2.1", "host:8000"]),
    "another patch": ({}, server("10.16.0"), ["carries 10.16.0"]),
    "another GPU": ({}, server(gpus=("9.0",)), ["compute capability 8.0 (NVIDIA A100)", "has 9.0"]),
    "one of several GPUs": ({}, server(gpus=("8.0", "7.5")), ["has 7.5"]),
    "no GPU": ({}, server(gpus=()), ["has no GPU"]),
    "ampere+ on an older generation": (
        {"hardware_compatibility": "ampere+"},
        server(gpus=("7.5",)),
        ["ampere+", "7.5"],
    ),
    "version compatible, in an older release": ({"version_compatible": True}, server("10.14.1"), ["later 10.x"]),
    "version compatible, in another major": ({"version_compatible": True}, server("11.2.1"), ["later 10.x"]),
    "a server without the backend": (
        {},
        replace(server(), has_tensorrt=False),
        ["no backend for plans", "enginehouse serve setup"],
    ),
    "an engine without its weights": ({"strip_weights": True}, server(), ["engine.strip_weights", "cannot add them"]),
    "both": ({}, server("11.2.1", ("9.0",)), ["carries 11.2.1", "has 9.0"]),
}


@pytest.mark.parametrize("name", FITS)
def test_a_server_that_fits_is_not_refused(name):
    changes, facts = FITS[name]
    assert mismatches(PASSPORT | changes, facts) == []


@pytest.mark.parametrize("name", DOES_NOT_FIT)
def test_a_server_that_does_not_fit_is_refused_with_both_sides_named(name):
    changes, facts, told = DOES_NOT_FIT[name]
    text = "\n".join(mismatches(PASSPORT | changes, facts))
    for part in told:
        assert part in text


def test_a_servers_tensorrt_is_found_by_its_own_version():
    assert ServerFacts.of("here", server_version="2.72.0", compute_capabilities=["9.0"]).tensorrt == "11.2.1"
    unknown = ServerFacts.of("here", server_version="2.51.0", compute_capabilities=None)
    assert (unknown.tensorrt, unknown.compute_capabilities) == (None, None)


def test_layers_are_counted_by_type_and_by_what_they_answer_in():
    layers = [
        {"LayerType": "CaskConvolution", "Outputs": [{"Format/Datatype": "Half NHWC"}]},
        {"LayerType": "CaskConvolution", "Outputs": [{"Format/Datatype": "Float NCHW"}]},
        {"LayerType": "NoOp", "Outputs": []},
        "only a name",
    ]
    assert layer_summary({"Layers": layers}) == {
        "count": 4,
        "by_type": {"CaskConvolution": 2, "NoOp": 1},
        "outputs_by_datatype": {"Float": 1, "Half": 1},
    }
