"""What a layer is worth after a repair: W_c and W_o of single layers, fitted while a search runs.

A wiring that is bad as it stands may be nearly free once W_c makes up for it, so a search judges each wiring repaired.
A repair of a layer is fitted to what the original makes of its *own* stream, whatever else a wiring changes, so that it
is fitted once, when it is first asked for. The wiring that is chosen is then fitted from below, to its own streams.

Memory: what enters every layer of the original, for the tokens that are fitted to.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from crosslayer.core.decoder.modeling import CrossLayerForCausalLM
from crosslayer.core.plan import STATES, DepthPlan
from crosslayer.verbs.retrofit.calibrate import fit_layer, fitted_layers
from crosslayer.verbs.retrofit.moments import is_enough
from crosslayer.verbs.retrofit.streams import Streams, layers_of

TOKENS = 8192  # that a repair is fitted to, or more where its inputs need them


class Entering:
    """What enters each layer of a plain model, over some text: wirings run from the first layer that they change."""

    def __init__(self, plain: CrossLayerForCausalLM, ids: Tensor):
        self.plain = plain
        streams = Streams(plain, plain, ids, follow="rewired")
        self.layers: list[list[Tensor]] = []  # of each layer the stream of each batch, (B, T, C)
        for layer in range(len(layers_of(plain))):
            self.layers.append([stream.clone() for stream in streams.after])
            streams.advance(layer)
        self.last = streams.after

    def at(self, layer: int, model: CrossLayerForCausalLM, follow: str) -> Streams:
        """Return the streams of the original and of a rewired model where they enter a layer."""
        return Streams(self.plain, model, self.layers[layer], follow)

    def logits(self, model: CrossLayerForCausalLM) -> list[Tensor]:
        """Return the logits of a rewired model, (T, V) of each sequence."""
        lowest, hidden = lowest_changed(model.config.plan), self.last
        if lowest < len(self.layers):
            streams = self.at(lowest, model, follow="rewired")
            for layer in range(lowest, len(self.layers)):
                streams.advance(layer)
            hidden = streams.after
        return [model._logits(model.model.norm(each)) for each in torch.cat(hidden)]


class Repairs:
    """Repairs of single layers, each fitted when it is first asked for, and then known."""

    def __init__(self, plain: CrossLayerForCausalLM, text: Mapping[str, Tensor], fit: str, inputs: int):
        """Look at the original on token ids (N, T) of each domain; `fit` is as in calibrate.py, of so many inputs."""
        domains = _few(list(text.values()), fit, inputs)
        self.fit, self.sizes = fit, [len(ids) for ids in domains]
        self.entering = Entering(plain, torch.cat(domains))
        self.known: dict[tuple, dict[str, Tensor]] = {}

    def apply(self, model: CrossLayerForCausalLM) -> None:
        """Repair every layer of a rewired model that has a W_c, or a W_o that is refitted."""
        for layer in fitted_layers(model, self.fit):
            reads = [model.config.plan.reads(state, layer) for state in STATES]
            wired = (layer, *reads, model.config.wiring.compensation[layer])
            block = layers_of(model)[layer]
            if wired in self.known:
                block.load_state_dict(self.known[wired], strict=False, assign=True)
            else:
                self._fit(model, layer, {lender for read in reads for lender in read} - {layer})
                fitted = ("compensation", "o_proj")
                weights = block.state_dict().items()
                self.known[wired] = {name: one for name, one in weights if any(part in name for part in fitted)}

    def _fit(self, model: CrossLayerForCausalLM, layer: int, lenders: set[int]) -> None:
        """Fit a layer that reads states of lenders, all of them on the original's own streams."""
        streams = self.entering.at(layer, model, follow="original")
        for lender in sorted(lenders):
            lending = self.entering.at(lender, model, follow="original")
            lending.borrow(lender)
            streams.carries = [{**own, **lent} for own, lent in zip(streams.carries, lending.carries, strict=True)]
        fit_layer(streams, layer, self.fit, self.sizes)


def _few(domains: list[Tensor], fit: str, inputs: int) -> list[Tensor]:
    """Return as few sequences of each domain, (N, T) each, as a repair needs."""
    length, most = domains[0].shape[1], max(len(ids) for ids in domains)
    for count in range(1, most):
        few = [ids[:count] for ids in domains]
        sizes = [len(ids) for ids in few]
        if sum(sizes) * length >= TOKENS and is_enough(inputs, sizes, length, fit):
            return few
    return domains


def lowest_changed(plan: DepthPlan) -> int:
    """Return the lowest layer that a plan changes, or whose states it lends; that above all layers if there is none."""
    own = DepthPlan.identity(plan.layers)
    touched = {plan.layers}
    for layer in range(plan.layers):
        reads = [plan.reads(state, layer) for state in STATES]
        if plan.mlps[layer] is None or reads != [own.reads(state, layer) for state in STATES]:
            touched |= {layer, *(lender for read in reads for lender in read)}
    return min(touched)
