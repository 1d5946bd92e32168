"""The application: every group of commands in its place."""

from importlib import metadata

from cyclopts import App

from flows import show
from flows.cli.artifacts import artifacts
from flows.cli.metrics import metrics
from flows.cli.releases import releases
from flows.cli.run import plan, run
from flows.cli.runs import runs
from flows.cli.serve import serve
from flows.cli.server import down, notify, up
from flows.cli.setup import doctor, engine, init

EXIT_STATUS = """\
Exit status:
  0    done
  1    a run on a Prefect server crashed or was cancelled; else an error in Enginehouse: please report it
  2    configuration: the pipeline file, the recipe or the command line is wrong
  3    a tool is missing
  4    a command failed
  5    a gate failed, or an export was refused
  6    a server is not ready
  7    an artifact is corrupt, or not reproducible
  8    the store or the model repository cannot be used
  9    refused, since it would overwrite or break something that exists
  10   rejected by the person who was asked for approval
  130  interrupted
"""

app = App(
    name="enginehouse",
    help="Takes a PyTorch model from training to a verified model on Triton Inference Server.",
    version=lambda: metadata.version("enginehouse"),
    help_epilogue=EXIT_STATUS,
    help_format="plaintext",
    console=show.help_console(),
    suppress_keyboard_interrupt=False,  # `flows.cli.main` tells what became of the run
)
for command in (run, plan, init, doctor, artifacts, serve, releases, engine, runs, metrics, up, down, notify):
    app.command(command)
