"""What the probe tells about this machine."""

from __future__ import annotations

import platform
import subprocess
import sys

from tasks.toolchain import probe
from tasks.toolchain.probe import Gpu


def test_versions_come_from_metadata_and_import_nothing() -> None:
    code = (
        "import sys; from tasks.toolchain.probe import *; print(distribution_version('torch'), 'torch' in sys.modules)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert told[0][0].isdigit()
    assert told[1] == "False"


def test_a_distribution_that_is_not_installed_has_no_version() -> None:
    assert probe.distribution_version("no-such-distribution") is None


def test_the_environment_of_a_record_is_text_and_names_what_is_missing() -> None:
    told = probe.environment(["numpy", "no-such-distribution"])
    assert told["python"] == platform.python_version()
    assert told["no-such-distribution"] == "not installed"
    assert int(told["cpus"]) >= 1
    assert all(isinstance(value, str) and value for value in told.values())


def test_gpus_are_read_from_what_nvidia_smi_prints() -> None:
    printed = "NVIDIA H200, 9.0, 143771, 570.86.15\nNVIDIA GeForce RTX 4090, 8.9, 24564, 570.86.15\n"
    assert probe.parse_gpus(printed) == (
        Gpu(name="NVIDIA H200", compute_capability="9.0", memory_mib=143771, driver="570.86.15"),
        Gpu(name="NVIDIA GeForce RTX 4090", compute_capability="8.9", memory_mib=24564, driver="570.86.15"),
    )
    assert probe.parse_gpus("") == ()
