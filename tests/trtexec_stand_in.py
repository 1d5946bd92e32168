"""Small programs in trtexec's place: they print a log of the documented format and leave what the test says.

They prove that processes are started, ended and judged rightly, and nothing about TensorRT.
"""

from __future__ import annotations

import stat
from pathlib import Path

LOGS = Path(__file__).parent / "golden" / "trtexec" / "logs"

RECIPE = "class Digits:\n    outputs = ('logits',)\n"
PIPELINE = """\
name: digits
recipe: recipe.py:Digits
data: {digits: {version: "1"}}
shapes: {batch: {min: 1, opt: 8, max: 32}}
inputs: {image: {dtype: float32, shape: [batch, 1, 8, 8]}}
serve: {max_batch_size: 32}
"""


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


PLAN = r"printf 'ftrt\357\000\000\000\000\000\000\000\000\000\000\000\000\000\000\000\000\000\000\000\012\020\001\013'"
"""The header of a plan of TensorRT 10.16.1.11, for the shell."""
SAVE = """\
for a in "$@"; do
    case "$a" in
        --saveEngine=*) plan="${a#--saveEngine=}" ;;
        --exportLayerInfo=*) layers="${a#--exportLayerInfo=}" ;;
    esac
done
"""
LAYERS = """\
cat > "$layers" <<END
{"Layers": [{"LayerType": "CaskConvolution", "Outputs": [{"Format/Datatype": "Half NCHW"}]}], "Bindings": []}
END
"""
GOOD = SAVE + f'{PLAN} > "$plan"\nhead -c 1804000 /dev/zero >> "$plan"\n' + LAYERS
