"""The types of the flows' parameters: what the server refuses before anything is queued, naming the parameter.

What each one means stands in the flow's docstring, where Prefect takes the form's texts from.
"""

from pathlib import Path
from typing import Annotated

from pydantic import Field

PipelineFile = Annotated[
    Path,
    # pydantic knows no pattern of a path; the server, which checks by the schema, does.
    Field(json_schema_extra={"pattern": r"\.ya?ml$"}),
]
Override = Annotated[str, Field(pattern=r"^\s*[\w-]+(\.[\w-]+)*\s*=", examples=["train.max_epochs=3"])]
Reason = Annotated[str, Field(min_length=1)]
ReleaseName = Annotated[str, Field(min_length=1)]
AtLeastOne = Annotated[int, Field(ge=1)]
