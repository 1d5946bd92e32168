"""Steady traffic through releases and rollbacks: nothing fails, nothing unproven answers. `make bench` is longer."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "benchmarks" / "swap_under_load.py"
_spec = spec_from_file_location("swap_under_load", BENCH)
swap_under_load = module_from_spec(_spec)
sys.modules["swap_under_load"] = swap_under_load
_spec.loader.exec_module(swap_under_load)


def check(result) -> None:
    assert result.errors == []
    assert (result.failed, result.unproven, result.wrong) == (0, 0, 0)
    assert result.rollbacks >= 2
    assert all(count > 20 for count in result.by_kind.values()), result.by_kind


def test_no_request_is_lost_and_nothing_unproven_answers(tmp_path, triton_installation):
    check(swap_under_load.run(tmp_path, releases=4, steady=1.0))


@pytest.mark.slow
def test_no_request_is_lost_through_fifty_releases(tmp_path, triton_installation):
    check(swap_under_load.run(tmp_path, releases=50, steady=5.0))


@pytest.mark.docker
def test_no_request_is_lost_through_ten_releases_of_two_containers(tmp_path):
    result = swap_under_load.run(tmp_path, releases=10, deploy="{kind: docker, replicas: 2}", steady=2.0)
    check(result)
    print(result.table())
