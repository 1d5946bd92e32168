"""The typed parameters of the flows: what a form shows, and what the server refuses before anything is queued."""

from pathlib import Path
from typing import Annotated

from pydantic import Field

PipelineFile = Annotated[
    Path,
    Field(
        description="The pipeline file, relative to the deployment's folder.",
        # pydantic knows no pattern of a path; the server, which checks by the schema, does.
        json_schema_extra={"pattern": r"\.ya?ml$"},
    ),
]
Override = Annotated[str, Field(pattern=r"^\s*[\w-]+(\.[\w-]+)*\s*=", examples=["train.max_epochs=3"])]
HomeFolder = Annotated[
    Path | None,
    Field(description="The folder with the store; found from the pipeline file or the current folder if left out."),
]
ReleaseName = Annotated[
    str,
    Field(
        min_length=1,
        description="A release such as `digits/release@3`, a pipeline's name, or its file.",
    ),
]
Reason = Annotated[str | None, Field(min_length=1, description="Why; kept with the record.")]
