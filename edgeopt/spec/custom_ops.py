"""The project's key `custom_ops`: how an operator of the user's own reaches runtimes other than torch."""

from __future__ import annotations

import re
from typing import Annotated, Any

import pydantic
from pydantic import Field, StrictInt, StrictStr

from edgeopt.spec.values import Value

_OPERATOR = re.compile(r"^[A-Za-z_][\w.]*::[A-Za-z_]\w*$")
_FUNCTION = re.compile(r"^[^:]+:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$")
# The domains whose operators onnxruntime holds itself, beside those of onnx:
# https://onnxruntime.ai/docs/operators/ContribOperators.html
ONNXRUNTIME_DOMAINS = ("", "ai.onnx", "ai.onnx.ml", "com.microsoft")


def _operator(value: str) -> str:
    if not _OPERATOR.match(value):
        raise ValueError(f"{value!r} is not namespace::operator, as in mylib::scale or com.acme::Scale")
    return value


def _function(value: str) -> str:
    if not _FUNCTION.match(value):
        raise ValueError(f"{value!r} is not file.py:function or package.module:function")
    return value


def _several(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


OperatorName = Annotated[StrictStr, pydantic.AfterValidator(_operator)]
Libraries = Annotated[tuple[StrictStr, ...], pydantic.BeforeValidator(_several)]


class CustomOp(Value):
    """One operator: a translation into ONNX's own operators, or a node of a foreign domain and who runs it.

    A library is a file, or one for each architecture.
    """

    onnx: Annotated[StrictStr, pydantic.AfterValidator(_function)] | None = Field(
        None, description="file.py:function that writes the operator with onnxscript's operators"
    )
    node: OperatorName | None = Field(None, description="domain::Type of the ONNX node, else the key itself")
    node_version: StrictInt = Field(1, ge=1, description="version of the node's domain")
    onnxruntime: Libraries = Field((), description="libraries that register the node with onnxruntime")
    tensorrt: Libraries = Field((), description="libraries that hold TensorRT's plugin")
    plugin: StrictStr | None = Field(None, description="the plugin's name, which is the node's type")
    plugin_version: StrictStr | None = Field(None, description="the plugin's version, '1' where it is not given")

    @pydantic.model_validator(mode="after")
    def _one_form(self) -> CustomOp:
        node = [key for key in ("node", "onnxruntime", "tensorrt", "plugin", "plugin_version") if getattr(self, key)]
        if self.onnx and node:
            raise ValueError(f"'onnx' writes ONNX's own operators, so that no node is left for '{node[0]}': keep one")
        if not self.onnx and not node:
            raise ValueError("nothing is said: give 'onnx', 'node', 'onnxruntime' or 'tensorrt'")
        if self.plugin and self.node and self.node.rpartition("::")[2] != self.plugin:
            raise ValueError(
                f"TensorRT finds a plugin by the node's type, and the type of {self.node} is not '{self.plugin}'"
            )
        return self

    @property
    def has_plugin(self) -> bool:
        """Whether TensorRT has the node: by a library, or by a plugin of its own."""
        return bool(self.tensorrt or self.plugin)


def node_of(key: str, op: CustomOp) -> str:
    """domain::Type of the node that stands for the operator `key`: as `node`, else as the plugin is called."""
    if op.node:
        return op.node
    return f"{key.rpartition('::')[0]}::{op.plugin}" if op.plugin else key
