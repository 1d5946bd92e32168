"""The commands `enginehouse releases`."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from flows import releases as acts
from flows import show
from flows.cli.console import HomeFolder, Json, home_at, notes_to_stderr, out, print_json, print_lines

releases = App(name="releases", help="What was released: list, show, promote, roll back.")

What = Annotated[
    str | None,
    Parameter(
        help="A pipeline file, a pipeline's name, or a release such as digits/release@3; "
        "the only pipeline with releases if left out."
    ),
]
Overrides = Annotated[
    Sequence[str],
    Parameter(name="--set", negative=(), help="With a pipeline file: set a field in place of the file's."),
]
Reason = Annotated[str | None, Parameter(help="Why, in your words; kept with the record.")]


@releases.command(name="ls")
def releases_ls(what: What = None, /, *, home: HomeFolder = None, as_json: Json = False) -> None:
    """List releases, oldest first: which is the champion, which the previous one, and their numbers."""
    if what is None:
        room = home_at(home)
        names = acts.pipelines_with_releases(room, notes_to_stderr)
        desks = [acts.open_desk(name, home=room.root, listener=notes_to_stderr) for name in names]
    else:
        desks = [acts.open_desk(what, home=home, listener=notes_to_stderr)]
    rows = [row for desk in desks for row in acts.listing(desk)]
    if as_json:
        print_json(rows)
        return
    lines = [
        [
            row["release"],
            row["state"] + (" (pinned)" if row["pinned"] else ""),
            f"{row['model']} {row['version']}",
            (row["promoted"] or "")[:19].replace("T", " "),
            row["by"] or "",
            ", ".join(f"{name} {list(values.values())[-1]:.4g}" for name, values in row["metrics"].items()),
        ]
        for row in rows
    ]
    out.print(show.rows(["release", "state", "version", "promoted (UTC)", "by", ""], lines))


@releases.command(name="show")
def releases_show(what: What = None, /, *, home: HomeFolder = None, as_json: Json = False) -> None:
    """Show a release, the champion if none is named: from which data and code, proven by which numbers."""
    shown = acts.describe(acts.open_desk(what, home=home, listener=notes_to_stderr))
    if as_json:
        print_json(shown)
        return
    head = {name: shown[name] for name in ("release", "state", "model", "version", "repository")}
    head["versions"] = [str(version) for version in shown["versions"]]
    head["verified"] = f"{shown['verified']['at'][:19]} UTC by {shown['verified']['by']}"
    if shown["override"]:
        head["released although a gate failed"] = shown["override"]
    print_lines(show.card(head))
    if shown["metrics"]:
        out.print(show.metrics_table(shown["metrics"]))
    steps = [
        [s["action"], s["at"][:19].replace("T", " "), s["by"], ", ".join(s["servers"]), s["reason"] or ""]
        for s in shown["history"]
    ]
    if steps:
        out.print(show.rows(["history", "at (UTC)", "by", "servers", "reason"], steps))
    materials = [[name, digest] for name, digest in shown["materials"].items()]
    out.print(show.rows(["made of", "content"], materials))
    out.print_json(data={"data": shown["data"], "gates": shown["gates"]})


@releases.command(name="promote")
def releases_promote(
    what: What = None,
    /,
    *,
    reason: Reason = None,
    overrides: Overrides = (),
    home: HomeFolder = None,
    as_json: Json = False,
) -> None:
    """Make a verified release the champion: the candidate if none is named. The servers are moved one by one."""
    desk = acts.open_desk(what, overrides=overrides, home=home, listener=notes_to_stderr)
    _print_moved(acts.promote(desk, reason=reason), as_json)


@releases.command(name="rollback")
def releases_rollback(
    what: What = None,
    /,
    *,
    to: Annotated[
        str | None, Parameter(help="A release, by name or number; the previous champion if left out.")
    ] = None,
    reason: Reason = None,
    overrides: Overrides = (),
    home: HomeFolder = None,
    as_json: Json = False,
) -> None:
    """Go back to the champion before the champion: its versions, and its configuration to the byte."""
    desk = acts.open_desk(what, overrides=overrides, home=home, listener=notes_to_stderr)
    _print_moved(acts.roll_back(desk, to=to, reason=reason), as_json)


@releases.command(name="pin")
def releases_pin(
    what: What = None,
    /,
    *,
    remove: Annotated[bool, Parameter(negative=(), help="Let retention have it again.")] = False,
    home: HomeFolder = None,
    as_json: Json = False,
) -> None:
    """Keep a release's versions in the repository for good, whatever `publish.keep` says."""
    done = acts.set_pin(acts.open_desk(what, home=home, listener=notes_to_stderr), remove=remove)
    if as_json:
        print_json(done)
    else:
        out.print(f"{done['release']}: {done['state']}")


@releases.command(name="repair")
def releases_repair(
    what: What = None,
    /,
    *,
    overrides: Overrides = (),
    home: HomeFolder = None,
    as_json: Json = False,
) -> None:
    """Finish or undo what a process that died has left half done, so that servers and records agree again."""
    done = acts.repair(acts.open_desk(what, overrides=overrides, home=home, listener=notes_to_stderr))
    if as_json:
        print_json(done)
        return
    for line in done["done"]:
        out.print(line, soft_wrap=True)
    serving = done["release"] or "nothing"
    out.print(f"{done['pipeline']}: {'repaired' if done['done'] else 'nothing to repair'}; serving {serving}")


@releases.command(name="bake")
def releases_bake(
    what: What = None,
    /,
    *,
    tag: Annotated[str, Parameter(help="The image's name, such as registry:5000/digits:7.")],
    base: Annotated[str, Parameter(help="The server's image.")] = "enginehouse/triton:cpu",
    push: Annotated[bool, Parameter(negative=(), help="Push it to the registry that its name begins with.")] = False,
    home: HomeFolder = None,
    as_json: Json = False,
) -> None:
    """Make a container image of a release, the champion if none is named: server, versions and config in one."""
    done = acts.bake(acts.open_desk(what, home=home, listener=notes_to_stderr), tag, base=base, push=push)
    if as_json:
        print_json(done)
    else:
        out.print(f"{done['release']} is in {done['digest'] or done['image']} ({done['id'][:19]})", soft_wrap=True)


@releases.command(name="shadow")
def releases_shadow(
    what: What = None,
    /,
    *,
    requests: Annotated[
        Path | None,
        Parameter(
            help="A file with one request a line, in the JSON of Triton's HTTP protocol; or an .npz of the inputs' "
            "arrays, one request a row. The golden inputs if left out."
        ),
    ] = None,
    live: Annotated[
        bool,
        Parameter(
            negative=(), help="Load the candidate beside the champion on the first live server, and unload it again."
        ),
    ] = False,
    home: HomeFolder = None,
    as_json: Json = False,
) -> None:
    """Replay requests to the champion and the candidate, on a staging server or live, and tell how they differ."""
    found = acts.shadow(acts.open_desk(what, home=home, listener=notes_to_stderr), requests=requests, live=live)
    if as_json:
        print_json(found)
        return
    out.print(f"{found['candidate']} beside {found['champion']}, {found['requests']} requests", soft_wrap=True)
    outputs = [
        [name, f"{v['max']:.3g}", f"{v['mean']:.3g}", f"{v['other_choice']} of {v['choices']}"]
        for name, v in found["outputs"].items()
    ]
    out.print(show.rows(["output", "largest difference", "mean", "another choice"], outputs))
    latencies = [[who, f"{v['p50']:.3g}", f"{v['p99']:.3g}"] for who, v in found["latency"].items()]
    out.print(show.rows(["latency (ms)", "p50", "p99"], latencies))


@releases.command(name="render")
def releases_render(
    what: What = None,
    /,
    *,
    image: Annotated[str, Parameter(help="The baked image with its digest: NAME@sha256:…")],
    replicas: Annotated[int, Parameter(help="Pods.")] = 2,
    gpus: Annotated[int, Parameter(help="GPUs of each pod.")] = 0,
    kserve: Annotated[bool, Parameter(negative=(), help="KServe's InferenceService instead of plain objects.")] = False,
    canary: Annotated[
        int | None, Parameter(help="With --kserve: the share of the traffic that goes to this release, in per cent.")
    ] = None,
    home: HomeFolder = None,
) -> None:
    """Print Kubernetes manifests for a release that was baked into an image; nothing is applied."""
    desk = acts.open_desk(what, home=home, listener=notes_to_stderr)
    sys.stdout.write(acts.render(desk, image, replicas=replicas, gpus=gpus, kserve=kserve, canary_percent=canary))


def _print_moved(done: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(done)
        return
    listed = ", ".join(map(str, done["versions"]))
    out.print(f"[bold]{done['release']}[/]: {done['state']}", soft_wrap=True)
    out.print(f"model {done['model']}, version {done['version']} (listed: {listed})", soft_wrap=True)
    out.print(f"serving at {', '.join(done['servers']) or 'no server'}", soft_wrap=True)
    if done["previous"]:
        out.print(f"going back leads to {done['previous']}", soft_wrap=True)
