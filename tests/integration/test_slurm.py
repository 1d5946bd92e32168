"""An engine built on a node of a real Slurm cluster, through `engine.builder.launcher`; and what ends there with us.

Slurm is real: a controller and two nodes, on this machine. What runs in trtexec's place, and what says which GPU there
is, are small programs.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tasks import engine
from tasks.errors import CommandFailed
from tasks.pipeline_file import load
from tasks.stage import Site, run_step
from tasks.toolchain.processes import find_free_ports
from tests.trtexec_stand_in import GOOD, LOGS, PIPELINE, RECIPE, program

pytestmark = pytest.mark.services

SLURM = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
KillWait=5
SlurmctldPort={ports[0]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=2000 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=2000 State=UNKNOWN
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""

ENGINE = """\
engine:
  kind: tensorrt
  tensorrt: 10.16.1
  compute_capability: "9.0"
  builder: {kind: local, launcher: [srun, --nodes=1, --nodelist=n2]}
"""

STUBBORN = f"""\
{sys.executable} -c "
import os, signal, time
os.setsid()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(os.environ['MARK'] + '.new', 'w').write(str(os.getpid()))
os.rename(os.environ['MARK'] + '.new', os.environ['MARK'])
time.sleep(600)
" &
trap '' TERM
wait
"""
"""In trtexec's place: it and a process in a session of its own go on when they are asked to end."""

BUILD = """
import sys
from pathlib import Path
from tests.integration.test_slurm import built
built(Path(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def slurm() -> Iterator[None]:
    """A cluster of two nodes; its commands find it by SLURM_CONF."""
    if os.geteuid() != 0 or not all(shutil.which(name) for name in ("munged", "slurmctld", "slurmd", "srun")):
        pytest.fail("a Slurm cluster needs root and: apt-get install slurm-wlm munge", pytrace=False)
    folder = Path("/tmp") / f"enginehouse-slurm-{os.getpid()}"  # munged wants a path that nobody else can write to
    folder.mkdir(mode=0o755)
    (folder / "state").mkdir()
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o400)
    host = socket.gethostname().partition(".")[0]
    (folder / "slurm.conf").write_text(SLURM.format(host=host, folder=folder, ports=find_free_ports(3)))
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    munge = [f"--{name.replace('_', '-')}={folder}/munge.{name}" for name in ("socket", "pid_file", "log_file")]
    daemons = [
        start("munged", "--foreground", f"--key-file={folder}/munge.key", f"--seed-file={folder}/munge.seed", *munge)
    ]
    try:
        wait_for((folder / "munge.socket").exists)
        daemons += [start("slurmctld", "-D"), start("slurmd", "-D", "-N", "n1"), start("slurmd", "-D", "-N", "n2")]
        wait_for(lambda: told("sinfo", "--noheader", "--nodes=n1,n2", "--format=%T").split() == ["idle"])
        yield
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait(20)
        del os.environ["SLURM_CONF"]
        shutil.rmtree(folder)


def start(*argv: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def told(*argv: str) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=30)
    return done.stdout if done.returncode == 0 else done.stderr


def wait_for(condition, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, told("squeue") + told("sinfo")
        time.sleep(0.1)


@pytest.fixture
def folder(tmp_path, monkeypatch, slurm) -> Path:
    """A pipeline whose engine is built behind `srun`; what the node finds on the PATH is in `bin`."""
    (tmp_path / "recipe.py").write_text(RECIPE)
    (tmp_path / "pipeline.yaml").write_text(PIPELINE + ENGINE)
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "model.onnx").write_bytes(b"a graph")
    (tmp_path / "export" / "signature.json").write_text("{}")
    program(tmp_path / "bin" / "nvidia-smi", "echo 'NVIDIA H200, 9.0, 595.58.03'\n")
    monkeypatch.setenv("ENGINEHOUSE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("MARK", str(tmp_path / "mark"))
    return tmp_path


def built(folder: Path):
    """Build the engine as the stage does."""
    made = Site(pipeline=load(folder / "pipeline.yaml"), materials={"export": folder / "export"}, work=folder / "work")
    made.product.mkdir(parents=True, exist_ok=True)
    for step in engine.STAGE.steps(made):
        run_step(step, log=folder / "log", on_line=lambda line: None)
    return engine.STAGE.collect(made)


def test_an_engine_is_built_on_the_node_that_the_launcher_asks_for(folder):
    where = folder / "where"
    node = f'echo "$SLURMD_NODENAME $SLURM_JOB_ID" > {where}\n'
    program(folder / "bin" / "trtexec", node + GOOD + f"sed 's/v101303/v101601/' {LOGS}/passed_10.log\n")
    passport = built(folder).details["passport"]
    assert passport["gpu"] == "NVIDIA H200"
    name, job = where.read_text().split()
    assert name == "n2"
    assert job.isdecimal()
    wait_for(lambda: told("squeue", "--noheader") == "")


def test_what_slurm_refuses_is_told_in_its_own_words(folder):
    file = folder / "pipeline.yaml"
    file.write_text(file.read_text().replace("--nodelist=n2", "--nodelist=n9"))
    program(folder / "bin" / "trtexec", GOOD)
    with pytest.raises(CommandFailed, match="Invalid node name specified"):
        built(folder)


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_job_and_its_stubborn_grandchild_end_with_whoever_started_the_build(folder, signal_number):
    program(folder / "bin" / "trtexec", STUBBORN)
    ours = subprocess.Popen(
        [sys.executable, "-c", BUILD, folder],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        wait_for((folder / "mark").exists)
        grandchild = psutil.Process(int((folder / "mark").read_text()))
        assert "slurmstepd" in {parent.name().partition(":")[0] for parent in grandchild.parents()}
        assert told("squeue", "--noheader") != ""
    finally:
        ours.send_signal(signal_number)
        ours.wait(30)
    wait_for(lambda: told("squeue", "--noheader") == "")
    wait_for(lambda: not grandchild.is_running())
    assert not (folder / "work" / "product" / "model.plan").exists()
