"""Writing the ONNX file: tracing, precision, metadata, and a comparison with the model before it takes its place."""

from __future__ import annotations

import ast
import json
import logging
import os
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from tpl._version import __version__
from tpl.errors import TplError
from tpl.export import check_ready
from tpl.export.graph import AnswerGraph, exportable
from tpl.files import at_home
from tpl.learner import Learner
from tpl.methods.base import UNKNOWN, Answers

if TYPE_CHECKING:
    import onnx

IMAGES = "images"
ANSWERS = ("log_probabilities", "task_probabilities", "unknown")
OPSET = 20
SCOPES = "pkg.torch.onnx.name_scopes"  # where the exporter notes which modules a node came from
LINEAR = "linear/"
LIMIT = 2**31 - 1  # bytes: protobuf's own
TOLERANCE = 1e-3  # of probabilities: an fp32 graph that differs by more is wrong
FEW = 16  # images that every new file is compared on
GRAINS = 1, 2, 8, 64  # of noise: cells along each side of an image, from one colour to fine grain
AT_ONCE = 64


@dataclass(frozen=True)
class Agreement:
    """How a file's answers compare with its model's. `right` counts only images whose class the model knows."""

    images: int = 0
    same: int = 0  # images with the same most probable class
    probability: float = 0.0  # the largest difference of a P(class)
    log_probability: float = 0.0
    unknown: float | None = None  # the largest difference of an unknown score, where the file has one
    known: int = 0  # images of classes that the model knows
    right: int = 0  # of those, by the file
    right_model: int = 0  # of those, by the model

    def to_dict(self) -> dict[str, Any]:
        """For `--json`; accuracies where there are images of known classes."""
        differences = {"probability": self.probability, "log_probability": self.log_probability}
        if self.unknown is not None:
            differences["unknown"] = self.unknown
        numbers: dict[str, Any] = {
            "images": self.images,
            "same_class": self.same,
            "largest_difference": differences,
        }
        if self.known:
            accuracy = {"accuracy": self.right / self.known, "accuracy_pytorch": self.right_model / self.known}
            numbers |= {"known": self.known, **accuracy}
        return numbers


@dataclass(frozen=True)
class Exported:
    """A file that was written, and how its answers compare with the model's on a few images."""

    file: Path
    precision: str
    bytes: int
    outputs: tuple[str, ...]
    comparison: Agreement


def export_onnx(learner: Learner, file: Path | str, precision: str = "fp32") -> Exported:
    """Write a model as one ONNX file; it appears when it is complete and was compared with the model.

    `fp16` keeps the trunk in half precision; `int8` quantises the trunk's linear layers. Scores stay float64 always.
    """
    file = at_home(file)
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


# Comparison with the model


def open_session(file: Path) -> Any:
    """The file in onnxruntime, on the CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors alone
    return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])


def compare(learner: Learner, file: Path, batches: Iterable[tuple[Tensor, Sequence[str] | None]]) -> Agreement:
    """Compare both on images of the encoder's size, with the names of their classes where these are known."""
    session = open_session(file)
    place = {name: i for i, name in enumerate(learner.classes_)}
    total = Agreement()
    for pixels, names in batches:
        for start in range(0, len(pixels), AT_ONCE):
            part = pixels[start : start + AT_ONCE]
            truth = None if names is None else [place.get(name, -1) for name in names[start : start + AT_ONCE]]
            answers = _answers(session, part)
            expected = learner.method.answer(part, [name for name in (UNKNOWN,) if name in answers])
            total = _added(total, answers, expected, truth)
    return total


def on_stored_images(learner: Learner, file: Path) -> Agreement:
    """Compare on a few images of the replay memory, or on noise where there are none."""
    memory, preprocess = learner.method.memory, learner.method.preprocess
    if memory is not None and len(memory):
        pixels = memory.pixels(preprocess, torch.device("cpu"))
        pixels = pixels[torch.linspace(0, len(pixels) - 1, min(FEW, len(pixels))).long()]
    else:
        pixels = _noise((preprocess.height, preprocess.width))
    return compare(learner, file, [(pixels, None)])


def _noise(size: tuple[int, int]) -> Tensor:
    """Random colours in cells of several sizes: of fine grain alone, all images would look alike to an encoder."""
    drawn, each = torch.Generator().manual_seed(0), FEW // len(GRAINS)
    cells = [torch.randint(0, 256, (each, 3, n, n), dtype=torch.uint8, generator=drawn) for n in GRAINS]
    return torch.cat([F.interpolate(part, size) for part in cells])


def _answers(session: Any, pixels: Tensor) -> dict[str, NDArray[np.float64]]:
    """The file's outputs by name."""
    names = [output.name for output in session.get_outputs()]
    found = session.run(names, {session.get_inputs()[0].name: pixels.numpy()})
    if not all(np.isfinite(part).all() for part in found):
        raise TplError(
            "The graph's answers are not all numbers: the trunk's values are too large for this precision. "
            "Use --precision fp32."
        )
    return {name: part.astype(np.float64) for name, part in zip(names, found, strict=True)}


def _added(
    total: Agreement, file: dict[str, NDArray[np.float64]], model: Answers, truth: list[int] | None
) -> Agreement:
    log_p, expected_log_p = file[ANSWERS[0]], model.log_p.numpy()
    best, expected = log_p.argmax(axis=1), expected_log_p.argmax(axis=1)
    labels = np.array(truth if truth is not None else [-1] * len(log_p))
    unknown = None if model.unknown is None else _largest(total.unknown or 0.0, file[UNKNOWN] - model.unknown.numpy())
    return Agreement(
        total.images + len(log_p),
        total.same + int((best == expected).sum()),
        _largest(total.probability, np.exp(log_p) - np.exp(expected_log_p)),
        _largest(total.log_probability, log_p - expected_log_p),
        unknown,
        total.known + int((labels >= 0).sum()),
        total.right + int((best == labels).sum()),
        total.right_model + int((expected == labels).sum()),
    )


def _largest(before: float, differences: NDArray[np.float64]) -> float:
    """The largest absolute difference so far."""
    return max(before, float(np.abs(differences).max(initial=0)))
