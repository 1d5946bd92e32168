"""The text of config.pbtxt: reviewed golden files, laws, and every mistake that the server would let pass."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.config import AxisRange, DynamicBatching, InstanceGroup, Pipeline, Serve
from tasks.errors import ConfigError
from tasks.stage import Identity, Site
from tasks.toolchain.config_pbtxt import HEADER, Accelerator, is_ours, listed_versions
from tasks.triton_config import STAGE, Signature, check, model_config, signature_of, with_versions

GOLDEN = Path(__file__).parent.parent / "golden" / "triton_config"
UPDATE = "ENGINEHOUSE_UPDATE_GOLDEN"  # set it to write the files anew, then review what git shows

BATCH = {"batch": AxisRange(min=1, opt=8, max=32)}
IMAGE = ("image", "float32", ["batch", 1, 8, 8])
LOGITS = ("logits", "float32", ["batch", 10])
ALL_TYPES = [
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "float32", "float64", "bfloat16", "string"),
]


def signature(inputs, outputs) -> Signature:
    def side(tensors):
        return [{"name": name, "dtype": dtype, "shape": shape} for name, dtype, shape in tensors]

    return Signature.from_json({"inputs": side(inputs), "outputs": side(outputs), "opset": 20, "ir_version": 10})


def case(
    inputs=(IMAGE,),
    outputs=(LOGITS,),
    *,
    platform="onnxruntime_onnx",
    shapes=None,
    accelerator=None,
    profiles=1,
    **serve,
):
    return {
        "platform": platform,
        "signature": signature(inputs, outputs),
        "serve": Serve(**serve),
        "shapes": BATCH if shapes is None else shapes,
        "accelerator": accelerator,
        "profiles": profiles,
    }


CASES = {
    "minimal": case([("x", "float32", [4])], [("y", "float32", [2])], shapes={}),
    "full": case(
        max_batch_size=32,
        dynamic_batching=DynamicBatching(max_queue_delay_microseconds=500, preferred_batch_size=(16, 8)),
        instance_group=(InstanceGroup(count=2, kind="KIND_CPU"), InstanceGroup(count=1, kind="KIND_AUTO")),
    ),
    "no_batching": case(max_batch_size=0),
    "no_dynamic_batching": case(max_batch_size=8),
    "dynamic_batching_by_default": case(max_batch_size=8, dynamic_batching=DynamicBatching()),
    "reshape": case(
        [("temperature", "float32", ["batch"])], [("score", "float32", ["batch"]), LOGITS], max_batch_size=4
    ),
    "dynamic_axes": case(
        [("tokens", "int64", ["batch", "length"]), ("mask", "bool", ["batch", "length"]), IMAGE],
        [("pooled", "float32", ["batch", 16]), ("states", "float16", ["batch", "length", 16])],
        shapes=BATCH | {"length": AxisRange(min=1, opt=16, max=64)},
        max_batch_size=16,
        dynamic_batching=DynamicBatching(max_queue_delay_microseconds=100),
    ),
    "types": case(
        [(f"{dtype}_in", dtype, ["batch", 3]) for dtype in ALL_TYPES],
        [(f"{dtype}_out", dtype, ["batch", 3]) for dtype in ALL_TYPES],
        max_batch_size=2,
    ),
    "tensorrt_plan": case(
        platform="tensorrt_plan", max_batch_size=32, instance_group=(InstanceGroup(count=1, kind="KIND_GPU"),)
    ),
    # TensorRT keeps int64 since 10, and every dynamic axis but the batch is open within the profiles.
    "tensorrt_sequences": case(
        [("tokens", "int64", ["batch", "length"]), ("mask", "bool", ["batch", "length"])],
        [("pooled", "float32", ["batch", 16]), ("states", "float16", ["batch", "length", 16])],
        platform="tensorrt_plan",
        shapes=BATCH | {"length": AxisRange(min=1, opt=16, max=64)},
        max_batch_size=32,
        dynamic_batching=DynamicBatching(max_queue_delay_microseconds=100),
    ),
    "tensorrt_profiles": case(
        platform="tensorrt_plan",
        max_batch_size=32,
        instance_group=(InstanceGroup(count=2, kind="KIND_GPU"),),
        profiles=3,
    ),
    "onnxruntime_on_gpu": case(max_batch_size=32, instance_group=(InstanceGroup(count=1, kind="KIND_GPU"),)),
    "onnxruntime_with_cuda": case(
        max_batch_size=32,
        instance_group=(InstanceGroup(count=1, kind="KIND_GPU"),),
        accelerator=Accelerator(name="cuda", parameters={"use_tf32": "0", "gpu_mem_limit": "2147483648"}),
    ),
    "onnxruntime_with_tensorrt": case(
        max_batch_size=32,
        instance_group=(InstanceGroup(count=1, kind="KIND_GPU"),),
        accelerator=Accelerator(
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
        ),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_config_is_to_the_byte_the_one_that_was_reviewed(name):
    text = model_config(model=name, **CASES[name])
    golden = GOLDEN / f"{name}.pbtxt"
    if os.environ.get(UPDATE):
        golden.write_text(text)
    assert text == golden.read_text()
    assert check(text, signature=CASES[name]["signature"]) == []


def test_a_released_config_is_to_the_byte_the_one_that_was_reviewed():
    text = with_versions(model_config(model="released", **CASES["full"]), [4, 3])
    golden = GOLDEN / "released.pbtxt"
    if os.environ.get(UPDATE):
        golden.write_text(text)
    assert text == golden.read_text()


def test_every_golden_file_belongs_to_a_case():
    assert {path.stem for path in GOLDEN.glob("*")} == {*CASES, "released"}


@given(st.lists(st.integers(0, 2**63 - 1), min_size=1), st.lists(st.integers(0, 2**63 - 1), min_size=1))
def test_setting_versions_changes_the_policy_and_no_other_byte(first, second):
    for name in ("full", "minimal", "reshape"):
        base = (GOLDEN / f"{name}.pbtxt").read_text()
        released = with_versions(base, first)
        assert with_versions(released, second) == with_versions(base, second)
        assert listed_versions(released) == tuple(sorted(set(first)))
        lines = released.splitlines()
        start = lines.index("version_policy {")
        assert lines[start + 1].strip() == "specific {"
        assert "\n".join([*lines[:start], *lines[start + 5 :]]) + "\n" == base


def test_a_config_without_a_list_lists_nothing():
    assert listed_versions((GOLDEN / "full.pbtxt").read_text()) is None
    assert listed_versions('name: "x" version_policy: { latest { num_versions: 2 } }') is None


def test_only_what_enginehouse_printed_counts_as_its_own():
    text = (GOLDEN / "full.pbtxt").read_text()
    assert text.startswith(HEADER)
    assert is_ours(text)
    assert not is_ours(text.removeprefix(HEADER))
    assert not is_ours("# " + text)


def test_comments_at_the_top_survive_another_list_of_versions():
    assert with_versions('# by hand\n# twice\nname: "x"  # gone\n', [1]).startswith('# by hand\n# twice\nname: "x"\n')


WRONG_SIGNATURES = {
    "no batch axis": (
        case([("x", "float32", [4])], [("y", "float32", ["batch", 4])], max_batch_size=4),
        ["serve.max_batch_size: input `x` [4] does not begin with the axis `batch`", "set serve.max_batch_size: 0"],
    ),
    "batch axis elsewhere": (
        case([("x", "float32", ["length", "batch"])], max_batch_size=4),
        ["input `x` [length, batch] does not begin with the axis `batch`"],
    ),
    "no axis at all": (case([("x", "float32", [])], max_batch_size=4), ["input `x` [] does not begin"]),
    "no axis and no batching": (
        case([("x", "float32", [])], max_batch_size=0),
        ["input `x` [] has no axis, and Triton has no such tensor (give it an axis of size 1)"],
    ),
    "rows that depend on each other": (
        case(outputs=[("similarity", "float32", ["batch", "batch"])], max_batch_size=4),
        ["output `similarity` [batch, batch] has the axis `batch` twice"],
    ),
    "misspelt type": (
        case([("x", "flaot32", ["batch", 4])], max_batch_size=4),
        ["input `x` [batch, 4] has the type `flaot32`", "did you mean `float32`?"],
    ),
    "type without a name": (
        case([("x", "complex64", ["batch", 4])], max_batch_size=4),
        ["has the type `complex64`, for which Triton has no name"],
    ),
    "batch above the declared one": (
        case(max_batch_size=64),
        ["serve.max_batch_size: 64 is above shapes.batch.max, 32"],
    ),
    "duplicate name": (case([IMAGE, IMAGE], max_batch_size=4), ["input: 2 inputs are named `image`"]),
    "no outputs": (case(outputs=[], max_batch_size=4), ["output: the model has no output"]),
    "empty axis": (
        case([("x", "float32", ["batch", 0])], max_batch_size=4),
        ["input[0].dims: 0 is no size of an axis"],
    ),
    "preferred batch above the largest": (
        case(max_batch_size=4, dynamic_batching=DynamicBatching(preferred_batch_size=(8,))),
        ["dynamic_batching.preferred_batch_size: 8 is not between 1 and max_batch_size, 4"],
    ),
    "dynamic batching without batches": (
        case(max_batch_size=0, dynamic_batching=DynamicBatching()),
        ["dynamic_batching: does nothing while max_batch_size is 0"],
    ),
}


@pytest.mark.parametrize("name", WRONG_SIGNATURES)
def test_what_triton_could_not_serve_is_refused_with_field_and_mend(name):
    arguments, expected = WRONG_SIGNATURES[name]
    with pytest.raises(ConfigError) as caught:
        model_config(model="m", **arguments)
    for text in expected:
        assert text in str(caught.value)


def test_every_problem_is_named_not_only_the_first():
    with pytest.raises(ConfigError) as caught:
        model_config(model="m", **case([("x", "float23", [4]), ("z", "int63", [4])], max_batch_size=64))
    assert len(caught.value.problems) == 5


BASE = (
    'name: "m"\nplatform: "onnxruntime_onnx"\nmax_batch_size: 8\n'
    'input { name: "x" data_type: TYPE_FP32 dims: [4] }\noutput { name: "y" data_type: TYPE_FP32 dims: [2] }\n'
)

MISTAKES = {
    "the same input twice": (
        BASE + 'input { name: "x" data_type: TYPE_FP32 dims: [4] }\n',
        "input: 2 inputs are named `x` (each name once)",
    ),
    "the same output twice": (
        BASE + 'output { name: "y" data_type: TYPE_FP32 dims: [4] }\n',
        "output: 2 outputs are named `y` (each name once)",
    ),
    "no inputs": (
        BASE.replace('input { name: "x" data_type: TYPE_FP32 dims: [4] }\n', ""),
        "input: the model has no input (declare at least one input)",
    ),
    "dynamic batching without batches": (
        BASE.replace("max_batch_size: 8", "max_batch_size: 0") + "dynamic_batching { }\n",
        "dynamic_batching: does nothing while max_batch_size is 0 (raise max_batch_size, or drop it)",
    ),
    "no instance": (BASE + "instance_group { count: 0 }\n", "instance_group[0].count: 0 instances serve nothing"),
    "fewer than no instance": (
        BASE + "instance_group { count: 1 }\ninstance_group { count: -1 }\n",
        "instance_group[1].count: -1 instances serve nothing",
    ),
    "a version that does not exist": (
        BASE + "version_policy { specific { versions: [1, 7] } }\n",
        "version_policy.specific.versions: version 7 does not exist (there: 1, 2)",
    ),
    "a list of no versions": (
        BASE + "version_policy { specific { } }\n",
        "version_policy.specific.versions: lists no version, so nothing would be served",
    ),
    "the batch axis repeated in the dims": (
        BASE.replace("dims: [4]", "dims: [-1, 4]"),
        "[-1, 4] does not fit the model's ['batch', 4]; max_batch_size above 0 adds the batch axis itself",
    ),
    "a preferred batch above the largest": (
        BASE + "dynamic_batching { preferred_batch_size: [4, 16] }\n",
        "dynamic_batching.preferred_batch_size: 16 is not between 1 and max_batch_size, 8",
    ),
    "a byte order mark": ("\ufeff" + BASE, "begins with a byte order mark, which Triton cannot read"),
    "a misspelt field": (
        BASE + "dynamic_batchin { }\n",
        'config.pbtxt cannot be read: Message type "inference.ModelConfig" has no field named "dynamic_batchin".',
    ),
    "two schedulers": (
        BASE + "dynamic_batching { }\nsequence_batching { }\n",
        "config.pbtxt cannot be read: ",
    ),
    "a type that is none": (BASE.replace("TYPE_FP32 dims: [4]", "FP32 dims: [4]"), "config.pbtxt cannot be read: "),
    "no type": (BASE.replace("data_type: TYPE_FP32 dims: [4]", "dims: [4]"), "input[0]: has no data_type"),
    "no name": (BASE.replace('name: "x" ', ""), "input[0]: has no name"),
    "no dims": (BASE.replace(" dims: [4]", ""), "input[0]: has no dims"),
    "a reshape to nothing without batches": (
        BASE.replace("size: 8", "size: 0").replace("dims: [4] }", "dims: [1] reshape { } }"),
        "input[0]: is reshaped to no axis at all, which needs a max_batch_size above 0",
    ),
    "an axis of no size": (BASE.replace("dims: [4]", "dims: [-2]"), "input[0].dims: -2 is no size of an axis"),
    "a negative batch": (BASE.replace("size: 8", "size: -8"), "max_batch_size: -8 is below 0 (0 turns batching off)"),
    "a tensor that the model lacks": (
        BASE + 'output { name: "z" data_type: TYPE_FP32 dims: [4] }\n',
        "output[1]: the model has no output `z`",
    ),
    "a tensor that was left out": (
        BASE.replace('name: "x"', 'name: "X"'),
        "input: the model's input `x` is not declared",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found_and_named(name):
    text, expected = MISTAKES[name]
    own = signature([("x", "float32", ["batch", 4])], [("y", "float32", ["batch", 2])])
    assert any(expected in str(problem) for problem in check(text, versions=[1, 2], signature=own))


def test_a_right_config_has_no_problem():
    own = signature([("x", "float32", ["batch", 4])], [("y", "float32", ["batch", 2])])
    text = BASE + "instance_group { kind: KIND_CPU }  # count: 0 would be wrong\n"
    assert check(with_versions(text, [1]), versions=[1, 2], signature=own) == []


def test_a_text_that_cannot_be_read_is_refused_with_its_line():
    (problem,) = check(BASE + "max_batch_size: 9\n")
    assert problem.line == 6


@pytest.mark.parametrize(
    ("change", "is_equal"),
    [
        (("max_batch_size: 8", "max_batch_size: 32"), True),
        (('platform: "onnxruntime_onnx"', 'platform: "tensorrt_plan"'), True),
        (("dims: [4] }", "dims: [4] }  # the same\ninstance_group { count: 2 }"), True),
        (("max_batch_size: 8", "max_batch_size: 0"), False),
        (("dims: [4]", "dims: [5]"), False),
        (("dims: [4]", "dims: [-1]"), False),
        (("TYPE_FP32 dims: [2]", "TYPE_FP16 dims: [2]"), False),
        (('name: "y"', 'name: "z"'), False),
    ],
)
def test_signatures_are_equal_if_a_client_cannot_tell_them_apart(change, is_equal):
    assert (signature_of(BASE) == signature_of(BASE.replace(*change))) is is_equal


def test_the_order_of_tensors_is_no_part_of_a_signature():
    lines = BASE.splitlines()
    assert signature_of("\n".join(reversed(lines))) == signature_of(BASE)


def test_a_signature_reads_as_a_person_would_write_it():
    assert str(signature_of(BASE)) == "x FP32 [batch, 4] -> y FP32 [batch, 2]"
    assert (
        str(signature_of((GOLDEN / "no_batching.pbtxt").read_text()))
        == "image FP32 [-1, 1, 8, 8] -> logits FP32 [-1, 10]"
    )


@pytest.mark.parametrize("first", ["ours", "tritonclient"])
def test_configs_are_built_without_importing_grpc_and_beside_it(first):
    """The generated module is loaded past its package; the package's own import must find the same messages."""
    program = f"""
import json, sys
def ours():
    from tasks.toolchain.config_pbtxt import messages, with_versions
    assert with_versions('name: "x"', [1])
    return messages().ModelConfig
def tritonclient():
    from tritonclient.grpc import model_config_pb2
    return model_config_pb2.ModelConfig
a = {first}()
heavy = sorted({{"grpc", "numpy"}} & sys.modules.keys())
print(json.dumps([heavy, ours() is tritonclient() is a]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [[] if first == "ours" else ["grpc", "numpy"], True]


# The stage


def pipeline(**changes) -> Pipeline:
    value = {
        "name": "digits",
        "recipe": "recipe.py:Digits",
        "data": {"digits": {"distribution": "scikit-learn"}},
        "shapes": {"batch": {"min": 1, "opt": 8, "max": 32}},
        "inputs": {"image": {"dtype": "float32", "shape": ["batch", 1, 8, 8]}},
        "serve": {"max_batch_size": 32},
    }
    return Pipeline.model_validate(value | changes)


@pytest.mark.parametrize(
    ("changes", "is_equal"),
    [
        ({"serve": {"max_batch_size": 16}}, False),
        ({"serve": {"max_batch_size": 32, "dynamic_batching": {}}}, False),
        ({"model": "other"}, False),
        ({"name": "other", "model": "digits"}, True),
        ({"publish": {"repository": "elsewhere"}}, True),
        ({"train": {"seed": 3}}, True),
        ({"shapes": {"batch": {"min": 1, "opt": 8, "max": 64}}}, True),
    ],
)
def test_the_key_holds_what_changes_the_config_and_nothing_else(changes, is_equal):
    identity = Identity(code=None, data=None)
    assert (STAGE.parts(pipeline(**changes), identity) == STAGE.parts(pipeline(), identity)) is is_equal


def test_the_stage_writes_the_config_from_the_engines_signature(tmp_path):
    engine = tmp_path / "engine"
    engine.mkdir()
    tensors = {"inputs": [IMAGE], "outputs": [LOGITS]}
    written = {side: [dict(zip(("name", "dtype", "shape"), t, strict=True)) for t in tensors[side]] for side in tensors}
    (engine / "signature.json").write_text(json.dumps(written | {"opset": 20, "ir_version": 10}))
    site = Site(pipeline=pipeline(), materials={"engine": engine}, work=tmp_path / "work")
    assert STAGE.steps(site) == ()
    STAGE.collect(site)
    assert [path.name for path in site.product.iterdir()] == ["config.pbtxt"]
    expected = model_config(model="digits", **case(max_batch_size=32))
    assert (site.product / "config.pbtxt").read_text() == expected
