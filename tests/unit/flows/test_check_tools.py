"""What a run asks for before it begins: the tools of what it will build, and of nothing else."""

from types import SimpleNamespace

import pytest

from flows import train_to_deploy
from tasks.errors import ToolMissing


def stage(name):
    def check(pipeline):
        raise ToolMissing("trtexec", why=f"{name} needs it", mend="install TensorRT")

    return SimpleNamespace(name=name, check=check)


@pytest.mark.parametrize(("state", "refused"), [("hit", False), ("miss", True), ("pending", True)])
def test_what_is_built_already_needs_no_tool(monkeypatch, state, refused):
    job = SimpleNamespace(
        stages=[stage("engine")], pipeline=None, selection=SimpleNamespace(covers=lambda name: name == "engine")
    )
    monkeypatch.setattr(train_to_deploy, "survey", lambda job: [SimpleNamespace(state=state)])
    if refused:
        with pytest.raises(ToolMissing, match="engine needs it"):
            train_to_deploy.check_tools(job)
    else:
        train_to_deploy.check_tools(job)
