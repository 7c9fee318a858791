"""Arithmetic of a graph as a polynomial in chosen nodes, so that one formula is known in all its spellings.

0.5 * x * (1 + e), x / 2 * (e + 1) and x * (0.5 * e + 0.5) are all 0.5 x + 0.5 x e. A polynomial is a mapping from
monomials, tuples of exponents of the chosen nodes, to coefficients in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from edgeopt.passes.changed import Context
from edgeopt.passes.layers import argument
from edgeopt.passes.scalars import ADD, DIV, MUL, NEG, SUB, number

_aten = torch.ops.aten
_RSUB = {_aten.rsub.Scalar, _aten.rsub.Tensor}
_POW = {_aten.pow.Tensor_Scalar: None, _aten.square.default: 2}
ARITHMETIC = MUL | DIV | ADD | SUB | _RSUB | NEG | set(_POW)

MOST_TERMS = 8
DEEPEST = 7  # operators from the last one down to a chosen node
ROUNDING = 2.5e-7  # of float32, twice: a constant may be the product of two that are written out

Polynomial = dict[tuple[int, ...], float]


class Unknown(Exception):
    """The arithmetic holds something that is no polynomial in the chosen nodes."""


@dataclass
class Reading:
    """`of(node)` is the node as a polynomial in `atoms`; `inside` collects the operators that it is made of."""

    context: Context
    atoms: Sequence[Node]
    inside: dict[Node, None] = field(default_factory=dict)

    def of(self, value: object, depth: int = DEEPEST) -> Polynomial:
        """Raises Unknown."""
        if value in self.atoms:
            return {tuple(int(atom is value) for atom in self.atoms): 1.0}
        constant = number(self.context, value)
        if constant is not None:
            return {(0,) * len(self.atoms): float(constant)}
        if depth == 0 or not isinstance(value, Node) or value.target not in ARITHMETIC:
            raise Unknown(getattr(value, "name", value))
        found = self._of_operator(value, depth - 1)
        if len(found) > MOST_TERMS:
            raise Unknown(value.name)
        self.inside[value] = None
        return found

    def _of_operator(self, node: Node, depth: int) -> Polynomial:
        first = self.of(node.args[0], depth)
        if node.target in NEG:
            return _scaled(first, -1)
        if node.target in _POW:
            return _power(first, _POW[node.target] or node.args[1], node)
        if node.target in DIV and node.kwargs.get("rounding_mode"):
            raise Unknown(node.name)
        second = self.of(node.args[1], depth)
        if node.target in MUL:
            return _product(first, second)
        if node.target in DIV:
            return _scaled(first, 1 / _constant(second, node))
        alpha = argument(node, "alpha")
        if not isinstance(alpha, int | float):
            raise Unknown(node.name)
        if node.target in _RSUB:
            return _sum(second, _scaled(first, -alpha))
        return _sum(first, _scaled(second, alpha if node.target in ADD else -alpha))


def _constant(polynomial: Polynomial, node: Node) -> float:
    ((powers, value),) = polynomial.items() if len(polynomial) == 1 else ((((1,), 0.0)),)
    if any(powers) or not value:
        raise Unknown(node.name)
    return value


def _scaled(polynomial: Polynomial, factor: float) -> Polynomial:
    return {powers: factor * value for powers, value in polynomial.items()}


def _sum(a: Polynomial, b: Polynomial) -> Polynomial:
    found = dict(a)
    for powers, value in b.items():
        found[powers] = found.get(powers, 0.0) + value
    return found


def _product(a: Polynomial, b: Polynomial) -> Polynomial:
    found: Polynomial = {}
    for left, x in a.items():
        for right, y in b.items():
            powers = tuple(i + j for i, j in zip(left, right, strict=True))
            found[powers] = found.get(powers, 0.0) + x * y
    return found


def _power(polynomial: Polynomial, exponent: object, node: Node) -> Polynomial:
    if exponent not in (1, 2, 3, 4) or isinstance(exponent, bool):
        raise Unknown(node.name)
    found = polynomial
    for _ in range(int(exponent) - 1):
        found = _product(found, polynomial)
        if len(found) > MOST_TERMS:
            raise Unknown(node.name)
    return found


def equal(found: Polynomial, wanted: Polynomial) -> bool:
    """Whether the coefficients agree to the rounding of float32."""
    return all(
        abs(found.get(powers, 0.0) - wanted.get(powers, 0.0)) <= ROUNDING * abs(wanted.get(powers, 0.0))
        for powers in found.keys() | wanted.keys()
    )


def similar(found: Polynomial, wanted: Polynomial) -> bool:
    """Whether the same monomials stand there with coefficients of the same sign: a near miss of a formula."""
    return found.keys() == wanted.keys() and all(found[p] * wanted[p] > 0 for p in wanted)
