"""What lower precision costs, layer by layer, and the shortest list of layers that must stay in fp32."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from .jobs import Parity
from .lowered import LOW, Arrays, Graph
from .precision_convert import Batches

PRUNED = 24
"""How many entries of a list are tried one by one whether it passes without them."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How far the answers lie from those in fp32."""

    max_abs: float
    excess: float
    """max(|got - fp32| - atol - rtol * |fp32|); at most 0 passes."""

    @property
    def within(self) -> bool:
        return self.excess <= 0


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One conversion."""

    model: onnx.ModelProto
    kept: tuple[str, ...]
    converted: tuple[str, ...]
    """Names of the nodes that work in lower precision."""
    difference: Difference


def compare(graph: Graph, check: Batches, expected: Batches, parity: Parity) -> Difference:
    """Hold a graph's answers against those in fp32."""
    return difference([graph.run(batch) for batch in check], expected, parity)


def difference(got: Batches, expected: Batches, parity: Parity) -> Difference:
    """The largest differences over all batches and outputs; infinite where a value is not finite."""
    largest, excess = 0.0, -math.inf
    for ours, theirs in zip(got, expected, strict=True):
        for name, wanted in theirs.items():
            values = ours[name].astype(np.float64)
            if not np.isfinite(values).all():
                return Difference(max_abs=math.inf, excess=math.inf)
            apart = np.abs(values - wanted)
            allowed = parity["atol"] + parity.get("rtol", 0.0) * np.abs(wanted.astype(np.float64))
            largest = max(largest, float(apart.max(initial=0.0)))
            excess = max(excess, float((apart - allowed).max(initial=-math.inf)))
    return Difference(max_abs=largest, excess=excess)


def layer_losses(
    reference: Graph, converted: Graph, nodes: Sequence[str], batches: Batches, precision: str
) -> dict[str, float]:
    """Per converted node, what it alone loses on exact inputs: the largest error over the largest magnitude of its
    answer; infinite where it overflows. Largest first."""
    places = {node.name: index for index, node in enumerate(reference.nodes)}
    low = LOW.get(precision)
    losses: dict[str, float] = {}
    sources = {node.output[0]: index for index, node in enumerate(converted.nodes)}
    for batch in batches:
        values: Arrays = {**reference.constants, **batch}
        for node in reference.steps(values):
            if node.name not in nodes:
                continue
            index = places[node.name]
            if low is not None:
                answers = reference.outputs_of(index, values, low)
            else:
                answers = _quantised_answers(reference, converted, node, index, values, sources)
            losses[node.name] = max(losses.get(node.name, 0.0), _loss(answers, {n: values[n] for n in answers}))
    return dict(sorted(losses.items(), key=lambda item: -item[1]))


def _quantised_answers(
    reference: Graph,
    converted: Graph,
    node: onnx.NodeProto,
    index: int,
    values: Arrays,
    sources: Mapping[str, int],
) -> Arrays:
    """What a node answers when its inputs went through their quantisation, each from its exact value."""
    twin = next(n for n in converted.nodes if n.name == node.name)
    given = dict(values)
    for ours, theirs in zip(node.input, twin.input, strict=False):
        if theirs not in sources or converted.nodes[sources[theirs]].op_type != "DequantizeLinear":
            continue
        dequantise = converted.nodes[sources[theirs]]
        scope: Arrays = {**converted.constants, **values}
        quantised = dequantise.input[0]
        if quantised in sources:
            quantise = converted.nodes[sources[quantised]]
            scope[quantise.input[0]] = values.get(ours, scope.get(quantise.input[0], np.zeros(0, np.float32)))
            scope.update(converted.outputs_of(sources[quantised], scope))
        given[ours] = converted.outputs_of(sources[theirs], scope)[theirs]
    return reference.outputs_of(index, given)


def _loss(answers: Arrays, exact: Arrays) -> float:
    worst = 0.0
    for name, value in answers.items():
        if value.dtype != np.float32 or not value.size:
            continue
        if not np.isfinite(value).all() and np.isfinite(exact[name]).all():
            return math.inf
        scale = float(np.abs(exact[name]).max()) or 1.0
        worst = max(worst, float(np.abs(value - exact[name]).max()) / scale)
    return worst


Quick = Callable[[Sequence[str], Sequence[str]], bool]
"""Whether the parity gate would pass with these converted nodes, of which these are kept; without a conversion."""


def quick_answer(precision: str, parity: Parity, reference: Graph, check: Batches, expected: Batches) -> Quick | None:
    """Compares on the arithmetic of `lowered`, without converting; `None` where the precision is no floating type."""
    low = LOW.get(precision)
    if low is None:
        return None

    def passes(converted: Sequence[str], kept: Sequence[str]) -> bool:
        rest = set(converted) - set(kept)
        got = [reference.run(batch, low=rest, to=low) for batch in check]
        return difference(got, expected, parity).within

    return passes


def search(
    attempt: Callable[[Sequence[str]], Attempt],
    losses: Mapping[str, float],
    first: Attempt,
    *,
    quick: Quick | None,
) -> Attempt | None:
    """The attempt that keeps the fewest nodes, or `None` if none of them passes.

    The nodes are ordered by what each loses; the shortest beginning of that list with which the gate passes is found by
    bisection, then every entry of it is tried for whether it passes without, the smallest loss first.
    """
    order = [name for name in losses if name in set(first.converted)]
    order += [name for name in first.converted if name not in losses]
    attempts: dict[tuple[str, ...], Attempt] = {}

    def full(kept: Sequence[str]) -> Attempt:
        key = tuple(kept)
        if key not in attempts:
            attempts[key] = attempt((*first.kept, *key))
        return attempts[key]

    def passes(kept: Sequence[str]) -> bool:
        if quick is not None:
            return quick(first.converted, kept)
        return full(kept).difference.within

    few, many = 0, len(order)
    if not passes(order):
        return None
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (few, middle) if passes(order[:middle]) else (middle, many)
    kept = order[:many]
    for name in list(reversed(kept))[:PRUNED]:
        without = [other for other in kept if other != name]
        if without and passes(without):
            kept = without
    found = full(kept)
    # What the quick arithmetic lets pass may miss by a hair once it is really converted: then more is kept.
    while not found.difference.within and many < len(order):
        many = min(len(order), max(many + 1, 2 * many))
        found = full(order[:many])
    return found if found.difference.within and found.converted else None
