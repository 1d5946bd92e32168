"""A pipeline file as a typed, frozen value.

    Pipeline                        pipeline.py   the whole file, and the checks between its groups
    ├── data      DataSource …      groups.py     the groups of fields
    ├── shapes    AxisRange
    ├── inputs    Input
    ├── train     Train
    ├── export    Export
    ├── engine    EngineConfig      kinds.py      by `kind`, from the entry points `enginehouse.engines`
    ├── serve     Serve
    ├── gates     Gates
    ├── publish   Publish
    └── deploy    DeployConfig      kinds.py      by `kind`, from the entry points `enginehouse.deploy_targets`

Every field is marked as keyed or placement (fields.py); `keyed(pipeline.train)` is what a stage's key holds of it.
Reading YAML, and saying what is wrong in which line, is `tasks.pipeline_file`'s.
"""

from tasks.config.fields import Keyed, Listed, Placement, Port, PositiveInt, Role, Settings, as_json, keyed, role
from tasks.config.groups import (
    AxisRange,
    DataSource,
    DType,
    DynamicBatching,
    Export,
    Gates,
    Input,
    InstanceGroup,
    LoadGate,
    MetricGate,
    Parity,
    Publish,
    Serve,
    Train,
)
from tasks.config.kinds import DEPLOY_TARGETS, ENGINES, DeployConfig, EngineConfig, kinds, load_kind
from tasks.config.names import Name, PathText, Text
from tasks.config.pipeline import BATCH, Pipeline

__all__ = [
    "BATCH",
    "DEPLOY_TARGETS",
    "ENGINES",
    "AxisRange",
    "DType",
    "DataSource",
    "DeployConfig",
    "DynamicBatching",
    "EngineConfig",
    "Export",
    "Gates",
    "Input",
    "InstanceGroup",
    "Keyed",
    "Listed",
    "LoadGate",
    "MetricGate",
    "Name",
    "Parity",
    "PathText",
    "Pipeline",
    "Placement",
    "Port",
    "PositiveInt",
    "Publish",
    "Role",
    "Serve",
    "Settings",
    "Text",
    "Train",
    "as_json",
    "keyed",
    "kinds",
    "load_kind",
    "role",
]
