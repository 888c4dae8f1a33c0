"""Which findings hold on other models: measures what docs/results/findings.md has in its section on four models.

    python benchmarks/models.py smollm2 gemma3 qwen    # measures what results/models.json lacks; an hour on two cores
    python benchmarks/models.py qwen --only eviction --force
    python benchmarks/findings.py                      # writes the page and docs/figures/scale.svg

All text is the embedded one. KL and losses are measured on 12 windows of 512 tokens (science, speeches, code). What is
fitted is fitted to 24 windows of 256 tokens (books, web, docs). Each finding is a number whose sign says whether it
holds; its 95% interval is over windows or items. Models run in float32, one after another.
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import qwen_1_5b  # noqa: F401  # makes qwen-1.5b known
import torch

import crosslayer
from crosslayer.core.decoder.convert import convert_weights
from crosslayer.core.methods import method_class
from crosslayer.corpus.domains import FITTED, embedded_domains, split_domains
from crosslayer.corpus.windows import Windows
from crosslayer.environment import environment
from crosslayer.judge.candidate import candidate_of
from crosslayer.judge.damage import Losses
from crosslayer.judge.judge import Judge
from crosslayer.judge.retrieval import hidden_samples
from crosslayer.verbs.intervene.kinds import waiver
from crosslayer.verbs.retrofit.convert import calibrate

RESULTS = Path(__file__).parent / "results" / "models.json"
UNSEEN = ("science", "speeches", "code")
WINDOWS, LENGTH = 4, 512  # of each domain that is judged
FIT_WINDOWS, FIT_LENGTH = 8, 256  # of each domain that is fitted to
RANKED = 1  # windows of each domain on which layers are ranked
LAYERS = {"83%": 1 / 6, "70%": 0.3}  # share of the attention layers that are dropped
ASKED = 8  # hidden numbers at each of five depths
ISOLATED = 255
REPAIRED: dict[str, Any] = {"compensation": "attention"}
SINK = 0.2  # share of attention at the first token, of a layer with a sink


class Model:
    """A model with what all findings read."""

    def __init__(self, name: str):
        self.name = name
        self.model, self.tokenizer = crosslayer.load_model(name, dtype="float32")
        documents = embedded_domains()
        parts = {"judged": dict.fromkeys(UNSEEN, WINDOWS)}
        self.judged = split_domains(documents, self.tokenizer, parts=parts, length=LENGTH)["judged"]
        parts = {"fit": dict.fromkeys(FITTED, FIT_WINDOWS), "ranked": dict.fromkeys(FITTED, RANKED)}
        found = split_domains(documents, self.tokenizer, parts=parts, length=FIT_LENGTH)
        self.fit, self.ranked = found["fit"], found["ranked"]
        parts = {"fit": {"books": FIT_WINDOWS * len(FITTED)}}
        self.books = split_domains(documents, self.tokenizer, parts=parts, length=FIT_LENGTH)["fit"]
        self.plain = convert_weights(self.model, []).model
        config = self.model.config.get_text_config()
        self.layers = config.num_hidden_layers
        self.masks = getattr(config, "layer_types", None) or ["full_attention"] * self.layers

    def kl(self, candidates: dict[str, Any], windows: Windows | None = None) -> dict[str, dict[str, list]]:
        """Return losses and KL by window of candidates: models, or ways to keep the cache."""
        judge = Judge(self.model, windows or self.judged, self.tokenizer, catches=False)
        found = judge.kl([candidate_of(given, name) for name, given in candidates.items()])
        return {name: packed(losses) for name, losses in found.items()}

    def converted(self, method: Any, fit: str | None = "layerwise", text: Windows | None = None) -> Any:
        """Return the model with a method, and its compensation fitted."""
        if fit != "refit-o" and fit is not None:
            method = dataclasses.replace(method, **REPAIRED)
        model = convert_weights(self.model, [method]).model
        if fit is not None:
            calibrate(self.plain, model, (text or self.fit).by_domain(), fit)
        return model

    def dropped(self, layers: list[int]) -> Any:
        """Return the method that drops the attention of layers."""
        return method_class("drop")(attention=tuple(layers))

    def blocks(self, size: int, saved: int) -> list[list[int]]:
        """Return blocks of up to `size` adjacent layers, from the top down, until they save `saved` caches.

        All layers of a block have the same attention mask.
        """
        found: list[list[int]] = []
        layer = self.layers - 1
        while layer > 0 and saved > 0:
            block = [layer]
            while block[0] > 0 and len(block) <= min(size - 1, saved) and self.masks[block[0] - 1] == self.masks[layer]:
                block.insert(0, block[0] - 1)
            if len(block) > 1:
                found.insert(0, block)
                saved -= len(block) - 1
            layer = block[0] - 1
        return found


def packed(losses: Losses) -> dict[str, list]:
    """Return the losses of each window as they are written."""
    rows = {name: np.round(losses.means[name], 7).tolist() for name in ("before", "after", "kl")}
    return {**rows, "documents": list(losses.documents), "domains": list(losses.domains)}


def ranks(model: Model, stored: dict[str, Any]) -> dict[str, Any]:
    """Return the KL of dropping each layer's attention alone."""
    candidates = {str(layer): model.converted(model.dropped([layer]), None) for layer in range(model.layers)}
    found = model.kl(candidates, model.ranked)
    return {"kl": [float(np.mean(found[str(layer)]["kl"])) for layer in range(model.layers)]}


def layers_by_cost(model: Model, costs: list[float], share: float) -> list[int]:
    """Return the layers with the least costs, a share of all."""
    return sorted(np.argsort(costs)[: round(share * model.layers)].tolist())


def dropping(model: Model, stored: dict[str, Any]) -> dict[str, Any]:
    """Compare dropped layers, those that cost the least alone, with 4 bits and with shared blocks."""
    costs = stored["ranks"]["kl"]
    chosen = {kept: layers_by_cost(model, costs, share) for kept, share in LAYERS.items()}
    blocks = model.blocks(4, len(chosen["70%"]))
    candidates = {
        "4 bits": "int4",
        "dropped, 83%": model.converted(model.dropped(chosen["83%"])),
        "dropped, 70%": model.converted(model.dropped(chosen["70%"])),
        "cla blocks, 70%": model.converted(method_class("cla").from_groups(blocks, model.layers)),
    }
    return {"kl": model.kl(candidates), "layers": {**chosen, "blocks": blocks}}


def refit(model: Model, stored: dict[str, Any]) -> dict[str, Any]:
    """Fit nothing, W_c, W_o, and both, where three pairs of layers share keys and values."""
    blocks = model.blocks(2, 3)
    method = method_class("cla").from_groups(blocks, model.layers)
    names = {"none": None, "W_c": "layerwise", "W_o": "refit-o", "W_o and W_c": "refit"}
    if model.model.config.model_type.startswith("gemma"):  # W_o cannot be refitted through the norm behind it
        names = {"none": None, "W_c": "layerwise"}
    return {"kl": model.kl({name: model.converted(method, fit) for name, fit in names.items()}), "blocks": blocks}


def calibration(model: Model, stored: dict[str, Any]) -> dict[str, Any]:
    """Fit W_c of UniAttn to books alone and to the mixture."""
    method = method_class("uniattn").from_groups(model.blocks(4, round(0.3 * model.layers)), model.layers)
    return {
        "kl": model.kl(
            {
                "none": model.converted(method, None),
                "books": model.converted(method, text=model.books),
                "mixture": model.converted(method),
            }
        )
    }


def sinks(model: Model, stored: dict[str, Any]) -> dict[str, Any]:
    """Diagnose each window alone: the first token's attention and values, and neighboring maps with and without it."""
    rows: dict[str, list] = {name: [] for name in ("share", "values", "maps", "maps_without")}
    for ids in model.judged.ids:
        one = crosslayer.diagnose(model.model, ids[None])
        upper = range(model.layers // 2, model.layers)
        sink = int(np.argmax(one.first_token_share))
        rows["share"].append(float(one.first_token_share[sink]))
        rows["values"].append(float(one.value_norm_ratio[sink]))
        rows["maps"].append(float(np.mean([one.map_similarity[i, i - 1] for i in upper])))
        rows["maps_without"].append(float(np.mean([one.map_similarity_without_first[i, i - 1] for i in upper])))
    return {**rows, "documents": list(model.judged.documents)}


def isolated(model: Model, stored: dict[str, Any]) -> dict[str, Any]:
    """Isolate a token: its share of later tokens' attention in the layers where the first token is a sink."""
    first = np.mean([crosslayer.diagnose(model.model, ids[None]).first_token_share for ids in model.judged.ids[:2]], 0)
    layers = [int(layer) for layer in np.flatnonzero(first > SINK)] or [int(first.argmax())]
    before, after = [], []
    for ids in model.judged.ids:
        effect = crosslayer.intervene(model.model, ids[None], interventions=[waiver(ISOLATED)], scan="none", controls=0)
        change = effect.positions[0].attention_received
        before.append(float(np.mean([change.before.array()[layer] for layer in layers])))
        after.append(float(np.mean([change.after.array()[layer] for layer in layers])))
    return {"before": before, "after": after, "layers": layers, "documents": list(model.judged.documents)}


def eviction(model: Model, stored: dict[str, Any]) -> dict[str, Any]:
    """Evict 40% of the cache by H2O: losses on text, and hidden numbers."""
    samples = hidden_samples(model.tokenizer, [LENGTH], ASKED)
    judge = Judge(model.model, model.judged, model.tokenizer, catches=False)
    found = {"original": judge.found(None, samples), "h2o:0.4": judge.found(candidate_of("h2o:0.4"), samples)}
    return {"kl": model.kl({"h2o:0.4": "h2o:0.4"}), "found": found}


FINDINGS: dict[str, Callable[[Model, dict[str, Any]], dict[str, Any]]] = {
    "sinks": sinks,
    "isolated": isolated,
    "eviction": eviction,
    "refit": refit,
    "calibration": calibration,
    "ranks": ranks,
    "dropping": dropping,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="smollm2, gemma3, qwen, or folders")
    parser.add_argument("--only", nargs="+", choices=list(FINDINGS), default=list(FINDINGS))
    parser.add_argument("--force", action="store_true", help="measure again what is there")
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    record = json.loads(options.json.read_text()) if options.json.exists() else {"models": {}}
    for name in options.models:
        stored = record["models"].setdefault(Path(name).name, {})
        missing = [finding for finding in options.only if options.force or finding not in stored]
        model = Model(name) if missing else None
        for finding in missing:
            started = time.perf_counter()
            assert model is not None
            with torch.no_grad():
                stored[finding] = FINDINGS[finding](model, stored)
            stored[finding]["seconds"] = round(time.perf_counter() - started, 1)
            stored[finding]["environment"] = environment().model_dump()
            options.json.write_text(json.dumps(record) + "\n")
            print(f"{name}: {finding}: {stored[finding]['seconds']:.0f} s", flush=True)


if __name__ == "__main__":
    main()
