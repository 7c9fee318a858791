"""The project's `evaluate` on a module in training."""

from __future__ import annotations

import numpy as np
import torch

from edgeopt.errors import DataError
from edgeopt.onboard.predictor import check_inputs
from edgeopt.ports import user_code
from edgeopt.program import Signature, graph
from edgeopt.quant.training.loop import Score
from edgeopt.runtime import evaluation
from edgeopt.spec.project import Project


def scorer(project: Project, signature: Signature) -> Score:
    """`score(module)` -> the metrics of evaluate; DataError where it raises or gives anything but finite numbers."""
    function = user_code.load_attribute(project.evaluate, project.folder, key="evaluate", error=DataError)
    evaluate = evaluation.taking_nested(function, signature.input_structure, signature.input_names)
    specs = [spec.model_dump() for spec in signature.inputs]
    axes = {name: axis.model_dump() for name, axis in signature.axes.items()}

    def score(module: torch.nn.Module) -> dict[str, float]:
        device = next((p.device for p in module.parameters()), torch.device("cpu"))

        def predict(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            try:
                arrays = check_inputs(inputs, specs, axes)
            except ValueError as why:
                raise DataError(
                    f"'predict' was called with inputs that do not fit: {why}", where="key 'evaluate'",
                    todo="give other sizes, or widen the axis in the project",
                ) from None  # fmt: skip
            named = dict(zip(signature.input_names, arrays, strict=True))
            with torch.no_grad():
                return graph.to_arrays(signature, module(*(t.to(device) for t in graph.to_tensors(signature, named))))

        return evaluation.record(evaluate, predict, most_bytes=0, base=project.folder).metrics

    return score
