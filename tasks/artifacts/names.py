"""Names for people: `pipeline/stage@number`, never given twice, and aliases such as `champion` that can be moved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tasks.artifacts.digest import Digest, canonical_json
from tasks.artifacts.durable import Scratch, create, names_in, replace, sync_folder
from tasks.artifacts.layout import Layout, checked_name, is_name
from tasks.artifacts.ledger import Lost, Pointer, parse_pointer, read_document
from tasks.artifacts.objects import Fault
from tasks.artifacts.record import ArtifactRef


@dataclass(frozen=True, slots=True)
class Name:
    """One name and what it stands for."""

    ref: ArtifactRef
    retired: str | None
    """When it was given up or removed by gc; the number stays taken."""


class Names:
    """The names and aliases of one store."""

    def __init__(self, layout: Layout, scratch: Scratch) -> None:
        self._layout = layout
        self._scratch = scratch

    def pipelines(self) -> list[str]:
        """All pipelines that have names, sorted."""
        return [name for name in names_in(self._layout.names) if is_name(name)]

    def stages(self, pipeline: str) -> list[str]:
        """All stages of a pipeline that have names, sorted."""
        folder = self._layout.names / checked_name(pipeline, "pipeline")
        return [name for name in names_in(folder) if is_name(name)]

    def numbers(self, pipeline: str, stage: str) -> list[int]:
        """All numbers given so far, also the retired ones, in order."""
        files = names_in(self._layout.stage_names(pipeline, stage))
        return sorted(int(stem) for file in files if (stem := file.removesuffix(".json")).isdecimal())

    def read(self, pipeline: str, stage: str, number: int) -> Name | None:
        """What a name stands for, None when it was never given; raises Lost for a damaged one."""
        subject = f"{pipeline}/{stage}@{number}"
        value = read_document(self._layout.stage_names(pipeline, stage) / f"{number}.json", "name", subject)
        if value is None:
            return None
        pointer = parse_pointer(value, "name", subject)
        ref = ArtifactRef(pipeline=pipeline, stage=stage, number=number, record=pointer.record, content=pointer.content)
        return Name(ref, value.get("retired"))

    def find(self, pipeline: str, stage: str, record: Digest) -> ArtifactRef | None:
        """The name that a record has in a pipeline, None when it has none."""
        known = self._indexed(pipeline, stage, record)
        if known is not None:
            return known
        for number in self.numbers(pipeline, stage):
            if (ref := self._of_record(pipeline, stage, number, record)) is not None:
                return ref
        return None

    def give(self, pipeline: str, stage: str, pointer: Pointer) -> ArtifactRef:
        """The record's name in a pipeline; a new number if it has none yet. Safe against others that do the same."""
        folder = self._layout.stage_names(pipeline, stage)
        if (known := self._indexed(pipeline, stage, pointer.record)) is not None:
            return known
        # Listed before it is searched: what others give in between is met again in the loop.
        number = max(self.numbers(pipeline, stage), default=0) + 1
        if (known := self.find(pipeline, stage, pointer.record)) is not None:
            return known
        while not create(folder / f"{number}.json", _document(pointer, None), self._scratch):
            # Someone was quicker: for the same record, or for another.
            if (ref := self._of_record(pipeline, stage, number, pointer.record)) is not None:
                return ref
            number += 1
        index = canonical_json({"format": 1, "number": number})
        replace(folder / "by-record" / f"{pointer.record.hex}.json", index, self._scratch, durable=False)
        return ArtifactRef(
            pipeline=pipeline, stage=stage, number=number, record=pointer.record, content=pointer.content
        )

    def retire(self, ref: ArtifactRef, when: str) -> None:
        """Marks a name as standing for nothing any more; its number is never given again."""
        folder = self._layout.stage_names(ref.pipeline, ref.stage)
        pointer = Pointer(ref.record, ref.content)
        replace(folder / f"{ref.number}.json", _document(pointer, when), self._scratch)
        (folder / "by-record" / f"{ref.record.hex}.json").unlink(missing_ok=True)

    def all(self, pipeline: str | None = None, stage: str | None = None) -> tuple[list[Name], list[Fault]]:
        """Every name, or those of a pipeline or stage, in order, and what is wrong with those that cannot be read."""
        names, faults = [], []
        for owner in self.pipelines() if pipeline is None else [pipeline]:
            for kind in self.stages(owner) if stage is None else [stage]:
                for number in self.numbers(owner, kind):
                    try:
                        name = self.read(owner, kind, number)
                    except Lost as lost:
                        faults.append(lost.fault)
                    else:
                        if name is not None:
                            names.append(name)
        return names, faults

    def point_alias(self, pipeline: str, alias: str, ref: ArtifactRef) -> None:
        """Points an alias at an artifact, from now on or anew."""
        path = self._layout.pipeline_aliases(pipeline) / f"{checked_name(alias, 'alias')}.json"
        target = {"pipeline": ref.pipeline, "stage": ref.stage, "number": ref.number}
        document = Pointer(ref.record, ref.content).to_json() | target
        replace(path, canonical_json(document), self._scratch)

    def drop_alias(self, pipeline: str, alias: str) -> bool:
        """Removes an alias; False when there was none."""
        path = self._layout.pipeline_aliases(pipeline) / f"{checked_name(alias, 'alias')}.json"
        try:
            path.unlink()
        except FileNotFoundError:
            return False
        sync_folder(path.parent)
        return True

    def alias(self, pipeline: str, alias: str) -> ArtifactRef | None:
        """What an alias points at, None when there is none; raises Lost for a damaged one."""
        path = self._layout.pipeline_aliases(pipeline) / f"{checked_name(alias, 'alias')}.json"
        value = read_document(path, "alias", f"{pipeline}@{alias}")
        return None if value is None else _target(value, f"{pipeline}@{alias}")

    def all_aliases(self, pipeline: str | None = None) -> tuple[dict[str, ArtifactRef], list[Fault]]:
        """Every alias (or one pipeline's) as `pipeline@alias`, and what is wrong with those that cannot be read."""
        found, faults = {}, []
        pipelines = [pipeline] if pipeline is not None else list(filter(is_name, names_in(self._layout.aliases)))
        for owner in pipelines:
            for name in self._alias_names(owner):
                try:
                    ref = self.alias(owner, name)
                except Lost as lost:
                    faults.append(lost.fault)
                else:
                    if ref is not None:
                        found[f"{owner}@{name}"] = ref
        return found, faults

    def _alias_names(self, pipeline: str) -> list[str]:
        files = names_in(self._layout.pipeline_aliases(pipeline))
        return [stem for file in files if is_name(stem := file.removesuffix(".json"))]

    def _indexed(self, pipeline: str, stage: str, record: Digest) -> ArtifactRef | None:
        """As `find`, but by the index alone: it may lack a name, and is no authority on any."""
        index = self._layout.stage_names(pipeline, stage) / "by-record" / f"{record.hex}.json"
        try:
            value = read_document(index, "index", record)
            return None if value is None else self._of_record(pipeline, stage, int(value["number"]), record)
        except (Lost, KeyError, ValueError):
            return None

    def _of_record(self, pipeline: str, stage: str, number: int, record: Digest) -> ArtifactRef | None:
        """The name of that number, if it stands for the record."""
        try:
            name = self.read(pipeline, stage, number)
        except Lost:
            return None
        return name.ref if name is not None and name.ref.record == record and name.retired is None else None


def _document(pointer: Pointer, retired: str | None) -> bytes:
    return canonical_json(pointer.to_json() | {"retired": retired})


def _target(value: dict[str, Any], subject: str) -> ArtifactRef:
    pointer = parse_pointer(value, "alias", subject)
    try:
        return ArtifactRef(
            pipeline=value["pipeline"],
            stage=value["stage"],
            number=value["number"],
            record=pointer.record,
            content=pointer.content,
        )
    except KeyError:
        raise Lost(Fault("alias", subject, "cannot be read")) from None
