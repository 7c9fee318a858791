"""The project's `evaluate` on a module in training."""

from __future__ import annotations

import numpy as np
import torch

from edgeopt.errors import DataError
from edgeopt.ports import user_code
from edgeopt.program import Signature, graph, heads
from edgeopt.program.predict import checked
from edgeopt.quant.training.loop import Score
from edgeopt.runtime import evaluation
from edgeopt.spec.project import Project


def scorer(project: Project, signature: Signature) -> Score:
    """`score(module)` -> the metrics of evaluate; DataError where it raises or gives anything but finite numbers."""
    function = user_code.load_attribute(project.evaluate, project.folder, key="evaluate", error=DataError)
    evaluate = evaluation.taking_nested(function, signature.input_structure, signature.input_names)

    def score(module: torch.nn.Module) -> dict[str, float]:
        device = next((p.device for p in module.parameters()), torch.device("cpu"))

        def predict(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            named = checked(inputs, signature)
            with torch.no_grad():
                found = module(*(t.to(device) for t in graph.to_tensors(signature, named)))
            return heads.answers(graph.to_arrays(signature, found), project.outputs)

        return evaluation.record(evaluate, predict, most_bytes=0, base=project.folder).metrics

    return score
