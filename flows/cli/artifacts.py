"""The commands `enginehouse artifacts`."""

import shlex
import sys
from typing import Annotated

from cyclopts import App, Parameter, validators
from rich.text import Text

from flows import show
from flows.cli.console import HomeFolder, Json, err, open_store, out, print_json
from tasks.artifacts.record import ArtifactRef, BuildRecord
from tasks.artifacts.store import ArtifactStore
from tasks.errors import ArtifactCorrupt, ConfigError, Problem

artifacts = App(name="artifacts", help="What was built: list, show, check, clean up.")


@artifacts.command(name="ls")
def artifacts_ls(
    pipeline: Annotated[str | None, Parameter(help="Only of this pipeline.")] = None,
    /,
    *,
    stage: Annotated[str | None, Parameter(help="Only of this stage.")] = None,
    home: HomeFolder = None,
    as_json: Json = False,
) -> None:
    """List what was built, newest last."""
    store = open_store(home)
    found = store.list(pipeline, stage)
    if not found:
        _check_known(store, pipeline, stage)
    aliases: dict[str, list[str]] = {}
    for name in {ref.pipeline for ref, _ in found}:
        for alias, ref in store.aliases(name).items():
            aliases.setdefault(str(ref), []).append(alias)
    if as_json:
        print_json(
            [
                {
                    "artifact": str(ref),
                    "content": str(ref.content),
                    "record": str(ref.record),
                    "aliases": sorted(aliases.get(str(ref), [])),
                    "finished": record.finished,
                    "metrics": dict(record.metrics),
                }
                for ref, record in found
            ]
        )
        return
    lines = [
        [
            str(ref),
            ref.content.short,
            show.size(store.content(ref).size),
            show.moment(record.finished),
            " ".join([*sorted(aliases.get(str(ref), [])), show.metrics_text(record.metrics)]),
        ]
        for ref, record in found
    ]
    out.print(show.rows(["artifact", "content", "size", "built (UTC)", ""], lines, cut=True))


def _check_known(store: ArtifactStore, pipeline: str | None, stage: str | None) -> None:
    """Raise `ConfigError` for a pipeline or a stage of which the store has nothing."""
    known = [ref for ref, _ in store.list()]
    for what, asked, names in (
        ("pipeline", pipeline, {ref.pipeline for ref in known}),
        ("stage", stage, {ref.stage for ref in known}),
    ):
        if asked is not None and asked not in names:
            there = ", ".join(sorted(names)) or "none"
            raise ConfigError(Problem(f"this store has nothing of a {what} {asked}", hint=f"there is: {there}"))


@artifacts.command(name="show")
def artifacts_show(
    artifact: Annotated[str, Parameter(help="Such as digits/engine@3, digits/engine, digits@champion or sha256:…")],
    /,
    *,
    only_command: Annotated[
        bool, Parameter(name="--command", negative=(), help="Print the command lines that built it, and nothing else.")
    ] = False,
    reproduce: Annotated[
        bool, Parameter(negative=(), help="Print a shell script that builds an engine again from a copy of its graph.")
    ] = False,
    home: HomeFolder = None,
    as_json: Json = False,
) -> None:
    """Show one artifact: its files, and the record of how they came to be."""
    store = open_store(home)
    ref = store.resolve(artifact)
    record, content = store.get_record(ref), store.content(ref)
    if only_command or reproduce:
        _print_commands(ref, record, reproduce=reproduce)
        return
    shown = {"artifact": str(ref), "content": content.to_json(), "record": record.to_json()}
    if as_json:
        print_json(shown)
        return
    out.print(f"[bold]{ref}[/]  {ref.content}")
    out.print(f"built {show.moment(record.started)} to {show.moment(record.finished)} UTC by {record.actor}")
    out.print(
        show.rows(["file", "size", "digest"], [[f.path, show.size(f.size), str(f.digest)] for f in content.files])
    )
    if record.materials:
        out.print(show.rows(["material", "content"], [[n, str(m.content)] for n, m in record.materials.items()]))
    for argv in record.commands:
        out.print(f"$ {shlex.join(argv)}", style="dim", soft_wrap=True)
    out.print_json(data={"key": record.to_json()["key"], "metrics": dict(record.metrics), "details": record.details})


def _print_commands(ref: ArtifactRef, record: BuildRecord, *, reproduce: bool) -> None:
    if not reproduce:
        for argv in record.commands:
            sys.stdout.write(shlex.join(argv) + "\n")
        return
    script = record.details.get("reproduce.sh")
    if script is None:
        raise ConfigError(f"{ref} has no script to build it again: only compiled engines have; see --command")
    sys.stdout.write(str(script))


@artifacts.command(name="lineage")
def artifacts_lineage(
    artifact: Annotated[str, Parameter(help="Such as digits/engine@3 or digits@champion.")],
    /,
    *,
    home: HomeFolder = None,
    as_json: Json = False,
) -> None:
    """Show what an artifact was made of, and what was made of it."""
    store = open_store(home)
    lineage = store.lineage(store.resolve(artifact))
    if as_json:
        print_json(lineage.to_json())
    else:
        out.print(show.lineage_tree(lineage.to_json()))


@artifacts.command(name="verify")
def artifacts_verify(*, home: HomeFolder = None, as_json: Json = False) -> None:
    """Read and hash every stored byte; what is corrupt is put aside, so that the next run builds it again."""
    store = open_store(home)
    with show.Bytes(err) as progress:
        corrupt = store.verify(on_progress=progress)
    if as_json:
        print_json([{"what": c.what, "problem": c.problem, "dependents": list(c.dependents)} for c in corrupt])
    for found in corrupt:
        err.print(Text.assemble(("corrupt", "red"), f" {found}"), soft_wrap=True)
    if corrupt:
        sys.exit(ArtifactCorrupt.exit_status)
    if not as_json:
        out.print("every stored byte is as it was stored")


@artifacts.command(name="gc")
def artifacts_gc(
    *,
    dry_run: Annotated[bool, Parameter(negative=(), help="Only say what would be removed.")] = False,
    keep: Annotated[
        int, Parameter(help="How many of the latest builds of each stage stay.", validator=validators.Number(gte=1))
    ] = 3,
    home: HomeFolder = None,
    as_json: Json = False,
) -> None:
    """Remove what no release, no alias and none of the latest builds needs."""
    garbage = open_store(home).gc(dry_run=dry_run, keep=keep)
    if as_json:
        shown = {"names": garbage.names, "records": garbage.records, "objects": garbage.objects, "works": garbage.works}
        print_json({"bytes": garbage.bytes, **{title: [str(item) for item in items] for title, items in shown.items()}})
        return
    for name in garbage.names:
        out.print(str(name))
    verb = "would remove" if dry_run else "removed"
    out.print(
        f"{verb} {len(garbage.records)} records, {len(garbage.objects)} objects and {len(garbage.works)} work folders: "
        f"{show.size(garbage.bytes)}"
    )
