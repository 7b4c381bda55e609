"""Writing the ONNX file: tracing, precision, what the file says of itself, and a test before it takes its place."""

from __future__ import annotations

import ast
import json
import logging
import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tpl._version import __version__
from tpl.errors import TplError
from tpl.export.compare import Comparison, on_stored_images
from tpl.export.graph import AnswerGraph, exportable
from tpl.export.ready import check_ready
from tpl.learner import Learner

if TYPE_CHECKING:
    import onnx

IMAGES = "images"
ANSWERS = ("log_probabilities", "task_probabilities", "unknown")
OPSET = 20
SCOPES = "pkg.torch.onnx.name_scopes"  # where the exporter notes which modules a node came from
LINEAR = "linear/"
LIMIT = 2**31 - 1  # bytes: protobuf's own
TOLERANCE = 1e-3  # of probabilities: an fp32 graph that differs by more is wrong


@dataclass(frozen=True)
class Exported:
    """A file that was written, and how its answers compare with the model's on a few images."""

    file: Path
    precision: str
    bytes: int
    outputs: tuple[str, ...]
    comparison: Comparison


def export_onnx(learner: Learner, file: Path | str, precision: str = "fp32") -> Exported:
    """Write a model as one ONNX file; it appears when it is complete and was compared with the model.

    `fp16` keeps the trunk in half precision; `int8` quantises the trunk's linear layers. Scores stay float64 always.
    """
    file = Path(file).expanduser()
    check_ready(file, precision)
    method = exportable(learner)
    graph = AnswerGraph(method, torch.float16 if precision == "fp16" else torch.float32)
    with tempfile.TemporaryDirectory(dir=file.parent, prefix=".tpl-export-") as folder:
        made = Path(folder) / file.name
        model = _traced(graph)
        if precision == "int8":
            model = quantised(model, Path(folder))
        _describe(model, learner, precision)
        _save(model, made)
        comparison = on_stored_images(learner, made)
        if precision == "fp32" and comparison.probability > TOLERANCE:
            raise TplError(
                f"The graph's probabilities differ from the model's by {comparison.probability:.2g}: something in the "
                f"encoder '{method.encoder.name}' is not exported rightly. Nothing was written."
            )
        os.replace(made, file)
    outputs = ANSWERS[: 2 + len(graph.want)]
    return Exported(file, precision, file.stat().st_size, outputs, comparison)


def _traced(graph: AnswerGraph) -> onnx.ModelProto:
    """The module as ONNX, the number of images left open."""
    preprocess = graph.method.preprocess
    example = torch.zeros(2, 3, preprocess.height, preprocess.width, dtype=torch.uint8)
    with _quiet(), torch.no_grad():
        traced = torch.export.export(graph.eval(), (example,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
        program = torch.onnx.export(
            traced,
            dynamo=True,
            input_names=[IMAGES],
            output_names=list(ANSWERS[: 2 + len(graph.want)]),
            opset_version=OPSET,
            external_data=False,
            verbose=False,
        )
    assert program is not None
    model: onnx.ModelProto = program.model_proto
    _name_linear_layers(model)
    _strip(model)
    return model


def _name_linear_layers(model: onnx.ModelProto) -> None:
    """Name the products with weights inside the transformer's blocks after their layers: `int8` looks for them."""
    weights = {tensor.name for tensor in model.graph.initializer}
    for node in model.graph.node:
        scopes = [entry.value for entry in node.metadata_props if entry.key == SCOPES and ".vit.blocks." in entry.value]
        if scopes and node.op_type == "MatMul" and node.input[1] in weights:
            *_, layer, _ = ast.literal_eval(scopes[0])
            node.name = LINEAR + layer.partition(".vit.")[2]


def _strip(model: onnx.ModelProto) -> None:
    """Remove what the exporter notes of how and where the graph was made: source files, line by line."""
    graph = model.graph
    del graph.value_info[:]  # inferred anew by whoever reads it; some of the exporter's are wrong
    for part in (graph, *graph.node, *graph.input, *graph.output, *graph.initializer):
        del part.metadata_props[:]
        part.doc_string = ""
    for value in (*graph.input, *graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "n"


@contextmanager
def _quiet() -> Iterator[None]:
    """The exporter warns of its own internals; a person can do nothing about that."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir", "root")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def _describe(model: onnx.ModelProto, learner: Learner, precision: str) -> None:
    """What a program needs to know that has nothing but the file."""
    import onnx

    method = learner.method
    encoder, preprocess = method.encoder, method.preprocess
    config = encoder.data_config
    facts: dict[str, Any] = {
        "tpl": __version__,
        "method": method.name,
        "precision": precision,
        "classes": learner.classes_,
        "tasks": [{"name": task.name, "classes": list(task.classes)} for task in learner.tasks_],
        "input_size": [3, preprocess.height, preprocess.width],
        "crop": float(config.get("crop_pct") or 1.0),
        "interpolation": str(config.get("interpolation") or "bicubic"),
        "encoder": {"name": encoder.name, "sha256": encoder.sha256, "fingerprint": encoder.fingerprint},
        "smallest_reject": learner.rejection_floor(),
    }
    del model.metadata_props[:]
    onnx.helper.set_model_props(
        model, {k: v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for k, v in facts.items()}
    )
    model.producer_name, model.producer_version = "tpl", __version__


def _save(model: onnx.ModelProto, file: Path) -> None:
    import onnx

    if model.ByteSize() > LIMIT:
        raise TplError("The graph has more than 2 GB, which a single ONNX file cannot hold; try --precision fp16.")
    onnx.checker.check_model(model)
    onnx.save_model(model, file)


def quantised(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    """The linear layers of the trunk with int8 weights; what goes into them is quantised as it comes."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    target = folder / "int8.onnx"
    with _quiet():
        quantize_dynamic(
            model,
            target,
            op_types_to_quantize=["MatMul"],
            nodes_to_quantize=[node.name for node in model.graph.node if node.name.startswith(LINEAR)],
            per_channel=True,
            weight_type=QuantType.QInt8,
        )
        found: onnx.ModelProto = onnx.load(target)
    return found
