"""What a project's own fusion rules are written with: `from edgeopt.rules import rule`. See docs/rules.md."""

from edgeopt.passes.rules import FusionRule, rule, scalar, tensor
from edgeopt.passes.rules_check import Checked, Trial, check_rule
from edgeopt.passes.rules_place import Match, Value

__all__ = ["Checked", "FusionRule", "Match", "Trial", "Value", "check_rule", "rule", "scalar", "tensor"]
