"""The engine kind `onnxruntime` with `gpu`: what it asks of Triton's backend, and what it refuses."""

from __future__ import annotations

import json

import pytest

from tasks.config import Parity
from tasks.engines.onnxruntime import OnnxRuntimeEngine
from tasks.errors import ConfigError
from tasks.pipeline_file import load
from tasks.toolchain.config_pbtxt import Accelerator

PIPELINE = """\
name: digits
recipe: recipe.py:Digits
data: {digits: {version: "1"}}
shapes: {batch: {min: 1, opt: 8, max: 32}}
inputs: {image: {dtype: float32, shape: [batch, 1, 8, 8]}}
"""


@pytest.fixture
def pipeline(tmp_path):
    def make(gpu=None, **fields):
        (tmp_path / "recipe.py").write_text("class Digits:\n    outputs = ('logits',)\n")
        file = tmp_path / "pipeline.yaml"
        file.write_text(PIPELINE + "engine: " + json.dumps({"kind": "onnxruntime", "gpu": gpu} | fields) + "\n")
        return load(file)

    return make


def test_without_gpu_nothing_is_asked_for(pipeline):
    assert OnnxRuntimeEngine.accelerator(pipeline()) is None


def test_the_cuda_provider_computes_in_fp32_unless_tf32_is_asked_for(pipeline):
    assert OnnxRuntimeEngine.accelerator(pipeline({"memory_limit_mib": 2048})) == Accelerator(
        name="cuda", parameters={"use_tf32": "0", "gpu_mem_limit": "2147483648"}
    )
    rounded = pipeline({"precision": "tf32"})
    assert OnnxRuntimeEngine.accelerator(rounded) == Accelerator(name="cuda", parameters={"use_tf32": "1"})
    assert OnnxRuntimeEngine.tolerance(rounded) == Parity(atol=1e-2, rtol=1e-2)
    assert OnnxRuntimeEngine.precision(rounded) == "tf32"


def test_the_tensorrt_provider_is_told_the_declared_shapes_its_precision_and_its_cache(pipeline):
    asked = pipeline(
        {
            "execution_provider": "tensorrt",
            "precision": "fp16",
            "max_workspace_size_mib": 4096,
            "engine_cache": "/var/cache/triton",
        }
    )
    assert OnnxRuntimeEngine.accelerator(asked) == Accelerator(
        name="tensorrt",
        parameters={
            "precision_mode": "FP16",
            "trt_profile_min_shapes": "image:1x1x8x8",
            "trt_profile_opt_shapes": "image:8x1x8x8",
            "trt_profile_max_shapes": "image:32x1x8x8",
            "max_workspace_size_bytes": "4294967296",
            "trt_engine_cache_enable": "true",
            "trt_engine_cache_path": "/var/cache/triton",
        },
    )


def test_the_tensorrt_provider_in_fp32_is_held_to_what_it_computes_in(pipeline):
    assert OnnxRuntimeEngine.precision(pipeline({"execution_provider": "tensorrt"})) == "tf32"


@pytest.mark.parametrize(
    ("gpu", "told"),
    [
        ({"precision": "fp16"}, "precision: fp16 belongs to execution_provider: tensorrt, got cuda"),
        ({"engine_cache": "/c"}, "engine_cache belongs to execution_provider: tensorrt, got cuda"),
        (
            {"execution_provider": "tensorrt", "memory_limit_mib": 1},
            "memory_limit_mib belongs to execution_provider: cuda",
        ),
        ({"execution_provider": "tensorrt", "precision": "int8"}, "expected"),
    ],
)
def test_what_the_provider_lacks_is_refused_in_the_file(pipeline, gpu, told):
    with pytest.raises(ConfigError) as refused:
        pipeline(gpu)
    assert told in str(refused.value)
    assert "engine.gpu" in str(refused.value)


def test_fp16_by_a_flag_that_the_targets_tensorrt_lacks_is_refused_before_the_run(pipeline):
    asked = {"execution_provider": "tensorrt", "precision": "fp16"}
    OnnxRuntimeEngine.check(pipeline(asked, target="26.05"))
    with pytest.raises(ConfigError, match=r"engine\.gpu\.precision: fp16 was a flag of TensorRT 10, and Triton 26\.08"):
        OnnxRuntimeEngine.check(pipeline(asked, target="26.08"))
