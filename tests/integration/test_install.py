"""What a user installs: the wheel holds all that a run needs, and nothing of the checkout."""

import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_holds_programs_the_server_side_and_the_template(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {
        "flows/cli/app.py",
        "tasks/programs/bootstrap.py",
        "tasks/programs/supervise.py",
        "tasks/containers/triton/requirements.txt",
        "tasks/containers/triton/backends/onnxruntime/model.py",
        "tasks/template/pipeline.yaml",
    } <= names
    assert not any(name.startswith(("tests/", "examples/", "model_repo/")) for name in names)


def test_the_installed_command_starts_a_pipeline_of_ones_own(wheel, tmp_path):
    venv.create(tmp_path / "venv", with_pip=False, system_site_packages=False)
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    zipfile.ZipFile(wheel).extractall(site)
    # The dependencies of the environment that runs the tests, without its editable install of the checkout.
    (site / "dependencies.pth").write_text(next(p for p in sys.path if p.endswith("site-packages")) + "\n")
    python = tmp_path / "venv" / "bin" / "python"

    def enginehouse(*arguments):
        done = subprocess.run(
            [str(python), "-I", "-m", "flows.cli", *map(str, arguments)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    enginehouse("init", "my-model")
    assert "never built before" in enginehouse("plan", "my-model/pipeline.yaml")
    where = subprocess.run(
        [str(python), "-I", "-c", "import tasks; print(tasks.__file__)"], capture_output=True, text=True, check=True
    )
    assert str(site) in where.stdout
