"""What a person sees in the terminal: progress while a run goes, its summary, tables of artifacts and plans."""

import os
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from tasks.events import Event

_STATE_STYLE = {
    "built": "green",
    "released": "green",
    "verified": "green",
    "published": "green",
    "started": "green",
    "reused": "cyan",
    "unchanged": "cyan",
    "hit": "cyan",
    "miss": "yellow",
    "pending": "dim",
    "failed": "red",
}

RUNTIME_TITLES = {
    "pytorch": "PyTorch",
    "onnx": "ONNX",
    "engine": "engine",
    "staging": "staging server",
    "live": "live server",
}


def styled(state: str) -> Text:
    """A state in its colour."""
    return Text(state, style=_STATE_STYLE.get(state.strip(), ""))


def duration(seconds: float) -> str:
    """Such as `0.3 s`, `41 s` or `2 min 05 s`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{int(seconds) // 60} min {int(seconds) % 60:02d} s"


def size(count: float) -> str:
    """Bytes for a person, such as `1.4 MB` (powers of ten)."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def moment(iso: str) -> str:
    """A record's time for a person, to the second, UTC."""
    return iso[:19].replace("T", " ")


def metrics_text(metrics: Mapping[str, float]) -> str:
    """`accuracy 0.9694, loss 0.11`."""
    return ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())


class _Console(Console):
    """When nobody reads any more, as after `head`: a run goes on without a word, a listing ends (`cli.main`)."""

    def on_broken_pipe(self) -> None:
        if not self.stderr:
            raise BrokenPipeError
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())


def console(*, stderr: bool = False) -> Console:
    """A console that breaks lines for a terminal only: what a file or another program reads keeps its lines whole."""
    made = _Console(stderr=stderr, highlight=False)
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made.width = 10_000
    return made


def help_console() -> Console:
    """A console for the help's frames, which are as wide as their console: a readable width wherever they go."""
    made = _Console(highlight=False)
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made.width = 100
    return made


class RunView:
    """Shows the events of one run: live lines on a terminal, one line per finished stage elsewhere."""

    def __init__(self, console: Console, *, verbose: bool = False) -> None:
        self._console = console
        self._verbose = verbose
        self._live: Live | None = None
        self._spinner = Spinner("dots")
        self._shown: tuple[str, float, str, Mapping[str, Any]] | None = None
        """What goes on now: its name, when it began, a text, and the last progress. Drawn by a thread of `Live`."""

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(console=self._console, get_renderable=self._running, refresh_per_second=8, transient=True)
            self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.__exit__(kind, error, trace)
            self._live = None

    def waits_for(self, what: str) -> None:
        """Tell what takes the time before the first stage begins."""
        self._shown = (what, time.monotonic(), "", {})

    def __call__(self, event: Event) -> None:
        """Take the next event."""
        match event["type"]:
            case "stage_started":
                self._shown = (event["stage"], time.monotonic(), event["why"] or "", {})
                if self._live is None:
                    self._console.print(Text(f"{event['stage']:<14} {event['why'] or 'begins'}", "dim"))
            case "progress":
                _, started, _, _ = self._shown or ("", time.monotonic(), "", {})
                self._shown = (event["stage"], started, event.get("text", ""), event)
            case "line" if self._verbose:
                self._console.print(Text(event["line"], style="dim"))
            case "note":
                # Not broken into lines by us: it may name a command to be copied.
                self._console.print(Text(f"note: {event['text']}", style="yellow"), soft_wrap=True)
            case "stage_ended":
                self._shown = None
                self._console.print(_stage_line(event, self._console.width), highlight=False, soft_wrap=True)
            case _:
                pass

    def _running(self) -> RenderableType:
        if self._shown is None:
            return Text("")
        name, started, text, progress = self._shown
        done, total = progress.get("done"), progress.get("total")
        bar = ""
        if done is not None and total:
            filled = round(20 * done / total)
            bar = "━" * filled + "╌" * (20 - filled) + " "
        metrics = metrics_text(progress.get("metrics") or {})
        row = Table.grid(padding=(0, 1))
        for _ in range(4):
            row.add_column(no_wrap=True)
        row.add_column()
        row.add_row(
            self._spinner,
            Text(f"{name:<14}"),
            Text(f"{duration(time.monotonic() - started):>12}", style="dim"),
            Text(bar, style="cyan"),
            Text.assemble(text, " ", (metrics, "dim"), no_wrap=True, overflow="ellipsis"),
        )
        return row


def _stage_line(event: Mapping[str, Any], width: int) -> Text:
    line = Text.assemble(
        (f"{event['stage']:<14} ", "bold"),
        (f"{event['state']:<10} ", _STATE_STYLE.get(event["state"], "")),
        f"{event['artifact'] or '':<26} ",
        (f"{duration(event['seconds']):>12}", "dim"),
    )
    metrics = metrics_text(event["metrics"])
    if metrics:
        fits = line.cell_len + 2 + cell_len(metrics) <= width
        line.append("  " if fits else f"\n{'':<15}").append(metrics, "dim")
    return line


def summary(report: Mapping[str, Any]) -> Iterator[RenderableType]:
    """The end of a run: what was built, how good it is where, and how to use it; to be printed without wrapping."""
    tables: list[RenderableType] = [_stage_table(report["stages"])]
    if report["metrics"]:
        tables += [Text(), metrics_table(report["metrics"])]
    title = {
        "released": "released, verified and serving",
        "unchanged": "nothing changed, serving what was verified",
    }.get(report["state"], report["state"])
    yield Panel(
        Group(*tables),
        title=f"[bold]{report['pipeline']}[/]: {title}",
        subtitle=f"in {duration(report['seconds'])}",
        border_style="green",
        padding=(1, 2),
        expand=False,
    )
    release, served = report.get("release"), report.get("served")
    if release is not None:
        word = "release" if release["promoted"] else "candidate"
        yield _fact(word, f"{release['name']}: model {release['model']}, version {release['version']}")
        yield _fact("published", release["repository"])
    if served is not None:
        yield _fact("serving", f"{served['http']} (gRPC {served['grpc']})")
        yield _fact("call it", served["call"])
        yield _fact("stop it", served["stop"])


def _fact(name: str, value: str) -> Text:
    return Text.assemble((f"{name:<11}", "bold"), value)


def _stage_table(stages: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("stage", "result", "artifact"):
        table.add_column(title, no_wrap=True)
    table.add_column("time", justify="right", no_wrap=True)
    for stage in stages:
        table.add_row(
            stage["stage"], styled(stage["state"]), stage["artifact"] or "", Text(duration(stage["seconds"]), "dim")
        )
    return table


def metrics_table(metrics: Mapping[str, Mapping[str, float]]) -> Table:
    """One row per metric, one column per runtime that it was measured on."""
    runtimes = [name for name in RUNTIME_TITLES if any(name in values for values in metrics.values())]
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("metric")
    for runtime in runtimes:
        table.add_column(RUNTIME_TITLES[runtime], justify="right")
    for name, values in metrics.items():
        table.add_row(name, *(f"{values[r]:.4f}" if r in values else "" for r in runtimes))
    return table


def plan_view(prospects: Sequence[Mapping[str, Any]]) -> Iterator[Text]:
    """What a run would do, and why; to be printed without wrapping, so that a command can be copied."""
    for prospect in prospects:
        yield Text.assemble(
            (f"{prospect['stage']:<14} ", "bold"), styled(f"{prospect['state']:<8}"), prospect.get("artifact") or ""
        )
        yield from (Text(f"    {reason}", "yellow") for reason in prospect["reasons"])
        yield from (Text(f"    $ {shlex.join(argv)}", "dim") for argv in prospect["commands"])
        yield from (Text(f"    {action}", "dim") for action in prospect["actions"])


def rows(titles: Sequence[str], lines: Sequence[Sequence[str]], *, cut: bool = False) -> Table:
    """A plain table. Where a terminal is too narrow, the last column is cut, or all but the first are folded."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in titles[:-1]:
        # The first column names things: it is what a person copies into the next command.
        table.add_column(title, overflow="fold", no_wrap=cut or title == titles[0])
    table.add_column(titles[-1], overflow="fold")  # were it no_wrap, all columns would be narrowed alike
    for *line, last in lines:
        table.add_row(*map(Text, line), Text(last, no_wrap=True, overflow="ellipsis") if cut else Text(last))
    return table


def lineage_tree(node: Mapping[str, Any]) -> Tree:
    """What an artifact was made of, as an indented tree, and below it what was made of it.

    What an artifact was made of is told once: an artifact that stands there a second time has no branches.
    """
    tree = Tree(_lineage_label(node))
    _grow(tree, node, told=set())
    return tree


def _grow(tree: Tree, node: Mapping[str, Any], *, told: set[str]) -> None:
    if node["record"] in told:
        if node["materials"]:
            tree.label = Text.assemble(_lineage_label(node), ("  (as above)", "dim"))
        return
    told.add(node["record"])
    for child in node["materials"].values():
        _grow(tree.add(_lineage_label(child)), child, told=told)
    if node["dependents"]:
        made = tree.add(Text("made of it:", style="dim"))
        for child in node["dependents"]:
            _grow(made.add(_lineage_label(child)), child, told=told)


def _lineage_label(node: Mapping[str, Any]) -> Text:
    name = ", ".join(node["names"]) or f"{node['stage'] or 'removed'} {node['record'][7:19]}"
    return Text.assemble((name, "bold"), (f"  {node['content'][:19]}", "dim"))


def card(values: Mapping[str, Any]) -> Iterator[Text]:
    """One thing with its properties, a line each; to be printed without wrapping, so that a value can be copied."""
    width = max(map(len, values))
    for name, value in values.items():
        text = ", ".join(value) if isinstance(value, list) else str(value)
        yield Text.assemble((f"{name:<{width}}  ", "dim"), text)


class Bytes:
    """A progress bar over bytes: called with how many are done, and of how many."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            *(TextColumn("reading"), BarColumn(), DownloadColumn(), TimeRemainingColumn()),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("bytes", total=None)

    def __enter__(self) -> Self:
        self._progress.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.__exit__(kind, error, trace)

    def __call__(self, done: int, total: int) -> None:
        self._progress.update(self._task, completed=done, total=total)
