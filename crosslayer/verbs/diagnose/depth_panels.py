"""The figures over depth: what sublayers read of earlier outputs, what they add, and the gradients by it."""

import math

import numpy as np

from crosslayer.output.panel import Heat, Panel
from crosslayer.verbs.diagnose.curves import NORM, SHARE, by_layer, curve, numbers
from crosslayer.verbs.diagnose.result import DepthWeights, Outputs

PLAIN = 1e-3  # a weight over depth that is as close to 1 is that of a plain residual, in bfloat16 too


def depth_panels(depth: DepthWeights) -> list[Panel]:
    """Return what sublayers read of earlier outputs and, where there are several residual streams, through which."""
    first = ", ".join(f"{index} is {name}" for index, name in enumerate(depth.sources[:3]))
    sentence = (
        "Mean weight of each earlier output in a sublayer's input; the last row is the output. Plain residuals have "
        "ones. A bright diagonal: each sublayer reads the one before. A bright first column: the embedding. Of the "
        f"sources, {first}, and so on; sublayer 0 is the first of layer 0."
    )
    drawn = [("depth_weights", "Weights over depth", sentence, "source (0 = embedding)", depth.weights, depth.sources)]
    if depth.streams is not None and depth.pairs is not None:
        streams = [f"stream {index}" for index in range(depth.streams.array().shape[1])]
        pairs = [f"{source}, {stream}" for source in depth.sources for stream in streams]
        sentence = "The weight of each residual stream in what a sublayer reads, mean over tokens."
        drawn.append(("stream_weights", "Weights of streams", sentence, "residual stream", depth.streams, streams))
        sentence = (
            "The weight of each earlier output in a sublayer's input through each residual stream: that of the stream, "
            f"times what the stream holds of the output. Each output has {len(streams)} columns, one for each stream."
        )
        drawn.append(("depth_pairs", "Weights over depth and streams", sentence, "source × stream", depth.pairs, pairs))
    figures = []
    for key, title, text, axis, measure, columns in drawn:
        z = measure.mean
        known = measure.array()[~np.isnan(measure.array())]
        ends = (math.floor(10 * known.min()) / 10, math.ceil(10 * known.max()) / 10) if len(known) else SHARE
        limits = (min(0.0, ends[0]), max(1.0, ends[1]))
        heat = Heat(numbers(z[0]), numbers(z), z, "mean weight", limits, columns=columns)
        figures.append(Panel(key, title, text, axis, "sublayer", heat=heat, wide=True))
    return figures


def read_most(depth: DepthWeights) -> list[list[str]]:
    """Return a finding on the earlier outputs that later sublayers read most; none if all read the plain sum."""
    weights = np.ma.masked_invalid(depth.weights.array())  # (readers, sources)
    if not abs(weights - 1).max() > PLAIN:
        return []
    # of sources that at least half of the sublayers can read: the others' means are over a few
    means = weights[:, : len(depth.sources) // 2 + 1].mean(axis=0).filled(-np.inf)
    most = np.argsort(-means, kind="stable")[:3]
    named, values = zip(*((depth.sources[source], f"{means[source]:.2f}") for source in most), strict=True)
    return [["read most over depth", ", ".join(named), f"mean weight {', '.join(values)}; plain residuals have 1"]]


def output_panels(outputs: Outputs) -> list[Panel]:
    """Return the figures of sublayers' outputs, and of the gradients with respect to them."""
    scale = {"log_y": True, "bounds": NORM}
    added = [curve(outputs.attention_output_norm, "attention"), curve(outputs.mlp_output_norm, "MLP")]
    gradients = [curve(outputs.attention_gradient_norm, "attention"), curve(outputs.mlp_gradient_norm, "MLP")]
    sentence = f"Mean norm over tokens of what each sublayer adds to the residual stream. {growth(outputs, 'output')}"
    of_gradients = (
        "Mean norm over tokens of the gradient of the summed loss at each sublayer's output. "
        f"{growth(outputs, 'gradient')}"
    )
    return [
        by_layer("output_norm", "What sublayers add", sentence, "L2 norm", added, **scale),
        by_layer("gradient_norm", "Gradients over depth", of_gradients, "L2 norm, nats", gradients, **scale),
    ]


def growth(outputs: Outputs, what: str) -> str:
    """Return the factor of the change of the norms from the first layer to the last, by their slopes.

    The ratio of the largest to the smallest norm is not shown: a single outlying layer decides it.
    """
    factors = []
    for sublayer, name in (("attention", "attention"), ("mlp", "MLPs")):
        layers = len(getattr(outputs, f"{sublayer}_{what}_norm").mean)
        slope = outputs.slopes[f"{sublayer}_{what}"].mean
        if slope is not None:
            factors.append(f"× {math.exp(slope * (layers - 1)):.3g} in {name}")
    return f"Over the depth it changes by {' and '.join(factors)} (from the slope of its logarithm)." if factors else ""
