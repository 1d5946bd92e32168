"""Weights are written plainly and read strictly."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
from torch import nn

from tasks.programs.weights import load_weights, plain_name, save_weights


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))


def test_equal_weights_are_equal_bytes(tmp_path):
    for name in ("one", "two"):
        save_weights(network(), tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


@pytest.mark.parametrize(
    "prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.", "module.module."]
)
def test_prefixes_of_wrappers_are_stripped(prefix, tmp_path):
    state = network(1).state_dict()
    save_file({prefix + name: value for name, value in state.items()}, tmp_path / "w")
    model = network(2)
    load_weights(model, tmp_path / "w", kind="export refused")
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_a_compiled_part_is_found_within_a_name():
    assert plain_name("encoder._orig_mod.layers.0.weight") == "encoder.layers.0.weight"


def test_a_module_that_is_really_called_module_keeps_its_name(tmp_path):
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = nn.Linear(2, 2)

    outer = Outer()
    save_weights(outer, tmp_path / "w")
    assert set(load_file(tmp_path / "w")) == {"module.weight", "module.bias"}
    load_weights(Outer(), tmp_path / "w", kind="export refused")


def test_tied_weights_are_written_under_each_name_and_read_from_one(tmp_path):
    model = Tied()
    save_weights(model, tmp_path / "all")
    assert set(load_file(tmp_path / "all")) == {"embed.weight", "head.weight"}
    save_model(model, str(tmp_path / "one"))
    assert len(load_file(tmp_path / "one")) == 1
    for name in ("all", "one"):
        other = Tied()
        load_weights(other, tmp_path / name, kind="export refused")
        assert torch.equal(other.head.weight, model.embed.weight)


def test_everything_that_does_not_fit_is_told_at_once(tmp_path, failure_of):
    state = network().state_dict()
    state["0.weights"] = state.pop("0.weight")
    state["1.bias"] = torch.zeros(7)
    save_file(state, tmp_path / "w")
    failure = failure_of(load_weights, network(), tmp_path / "w", kind="configuration")
    assert failure.kind == "configuration"
    assert "the file lacks 0.weight\n" in failure.message
    assert "the model has no 0.weights\n" in failure.message
    assert "1.bias is [7] in the file and [3] in the model" in failure.message
    assert failure.hint == 'did you mean "0.weights"?'


def test_a_file_of_torch_save_is_told_from_a_safetensors_file(tmp_path, failure_of):
    torch.save(network().state_dict(), tmp_path / "w")
    failure = failure_of(load_weights, network(), tmp_path / "w", kind="configuration")
    assert "not a readable safetensors file" in failure.message
    assert "safetensors.torch.save_model" in failure.hint
