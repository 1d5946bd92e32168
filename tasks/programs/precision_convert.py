"""The tools that put a lower precision into a graph: ModelOpt's AutoCast and quantiser, ONNX Runtime's quantiser."""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from .jobs import PrecisionJob
from .lowered import LOW, Arrays, Graph

LARGE = 1_500_000_000
"""Bytes from which weights go into a file of their own, as the export does it."""

Batches = Sequence[Arrays]


def named(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same graph, each node with a name of its own, by which it can be kept in fp32."""
    seen: set[str] = set()
    for index, node in enumerate(model.graph.node):
        if not node.name or node.name in seen:
            node.name = f"{node.op_type}_{index}"
        seen.add(node.name)
    return model


@dataclass(frozen=True, kw_only=True)
class Converter:
    """The tool that converts, with what it needs."""

    job: PrecisionJob
    original: onnx.ModelProto
    calibration: Batches
    work: Path

    def convert(self, kept: Sequence[str]) -> onnx.ModelProto:
        """The graph in the job's precision, but for the nodes `kept`."""
        with tempfile.TemporaryDirectory(dir=self.work) as folder:
            source = Path(folder) / "fp32.onnx"
            onnx.save(self.original, source, save_as_external_data=self.original.ByteSize() > LARGE)
            match self.job["precision"], self.job["quantizer"]:
                case ("fp16" | "bf16") as low, _:
                    return named(self._autocast(source, low, kept))
                case "int8", "onnxruntime":
                    return named(self._onnxruntime(source, Path(folder) / "int8.onnx", kept))
                case mode, _:
                    return named(self._modelopt(source, mode, Path(folder) / "qdq.onnx", kept))

    def _autocast(self, source: Path, low: str, kept: Sequence[str]) -> onnx.ModelProto:
        from modelopt.onnx.autocast import convert_to_mixed_precision

        batches = source.parent / "batches"
        batches.mkdir()
        for index, batch in enumerate(self.calibration):
            np.savez(batches / f"{index:05}.npz", **batch)  # type: ignore[arg-type] # numpy's stub takes any name for a flag
        converted: onnx.ModelProto = convert_to_mixed_precision(
            onnx_path=str(source),
            low_precision_type=low,
            keep_io_types=True,
            calibration_data=str(batches),
            nodes_to_exclude=[f"^{re.escape(name)}$" for name in kept],
            # Overflow is what the comparison finds, on data; AutoCast's own caution (512) would keep half a
            # transformer in fp32 unasked. Its limit stays where fp16 itself ends.
            data_max=65504.0 if low == "fp16" else math.inf,
        )
        return converted

    def _modelopt(self, source: Path, mode: str, target: Path, kept: Sequence[str]) -> onnx.ModelProto:
        from modelopt.onnx.quantization import quantize

        quantize(
            onnx_path=str(source),
            quantize_mode=mode,
            calibration_data_reader=_Reader(self.calibration),
            calibration_eps=["cpu"],
            high_precision_dtype="fp32",
            nodes_to_exclude=[f"^{re.escape(name)}$" for name in kept],
            output_path=str(target),
            log_level="WARNING",
        )
        return onnx.load(target)

    def _onnxruntime(self, source: Path, target: Path, kept: Sequence[str]) -> onnx.ModelProto:
        from onnxruntime.quantization import QuantFormat, QuantType, quantize_static

        quantize_static(
            str(source),
            str(target),
            _Reader(self.calibration),
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=["Conv", "MatMul", "Gemm"],
            nodes_to_exclude=list(kept),
            per_channel=True,
            activation_type=QuantType.QInt8,
            weight_type=QuantType.QInt8,
            # TensorRT takes symmetric int8 only, and adds the bias in higher precision itself.
            extra_options={"ActivationSymmetric": True, "WeightSymmetric": True, "QuantizeBias": False},
        )
        return onnx.load(target)


class _Reader:
    """Calibration data as onnxruntime's calibrator asks for it."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self.rewind()

    def get_next(self) -> Mapping[str, Any] | None:
        return next(self._iterator, None)

    def rewind(self) -> None:
        self._iterator = iter(self._batches)

    def get_first(self) -> Mapping[str, Any]:
        return self._batches[0]


def converted_nodes(model: onnx.ModelProto) -> list[str]:
    """The nodes that work in lower precision: those that write fp16 or bf16, or whose inputs are dequantised."""
    graph = Graph(model)
    dequantised = {node.output[0] for node in model.graph.node if node.op_type == "DequantizeLinear"}
    helpers = ("Cast", "QuantizeLinear", "DequantizeLinear", "Constant")
    found = []
    for node in model.graph.node:
        if node.op_type in helpers:
            continue
        low = any(graph.types.get(name) in LOW.values() for name in node.output)
        if low or any(name in dequantised for name in node.input):
            found.append(node.name)
    return found
