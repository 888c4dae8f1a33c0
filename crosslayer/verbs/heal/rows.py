"""The training rows of a recovery: the same for every model, in the same order."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.data import Subset
from transformers import PreTrainedTokenizerFast

from crosslayer.models.embedded import cache_folder
from crosslayer.training.mixture import FixedRows, Mixture, spread
from crosslayer.training.shards import Shards
from crosslayer.training.texts import DomainShards
from crosslayer.verbs.heal.instructions import ExampleRows
from crosslayer.verbs.heal.recipe import HealRecipe


@dataclass(frozen=True)
class RecoveryRows:
    """Tokenized text: training rows, and held-out rows by domain."""

    recipe: HealRecipe
    tokenizer: PreTrainedTokenizerFast
    shards: dict[str, DomainShards]

    def training(self, items: int) -> Mixture:
        """Return the rows of a stage; all stages start with the same rows."""
        data = self.recipe.data
        texts = {name: shards.training for name, shards in self.shards.items()}
        weights = {part.name: part.weight for part in data.domains}
        return Mixture(texts, weights, data.length, self.recipe.seed, items, self._tables())

    def held_out(self) -> dict[str, Subset[dict[str, Tensor]]]:
        """Return held-out rows of each domain, spread evenly over it."""
        count, length = self.recipe.eval.held_out, self.recipe.data.length
        rows = {}
        for part in self.recipe.data.domains:
            text = self.shards[part.name].validation
            plain = part.columns is None
            every = FixedRows(text, length, part.name) if plain else self._examples(part.name, text)
            rows[part.name] = spread(every, count)
        return rows

    def left_out(self) -> dict[str, int]:
        """Return how many instructions of each domain are longer than a row."""
        return {name: examples.left_out for name, examples in self._tables().items()}

    def _tables(self) -> dict[str, ExampleRows]:
        names = [part.name for part in self.recipe.data.domains if part.columns is not None]
        return {name: self._examples(name, self.shards[name].training) for name in names}

    def _examples(self, name: str, text: Shards) -> ExampleRows:
        padding: Any = self.tokenizer.pad_token_id
        alone = self.recipe.objective.loss == "response"
        return ExampleRows(text, self.recipe.data.length, 0 if padding is None else padding, name, alone)


def read_rows(recipe: HealRecipe, tokenizer: PreTrainedTokenizerFast) -> RecoveryRows:
    """Tokenize the text of a recipe, or read its tokens from the cache."""
    folder = cache_folder() / "tokens"
    shards = {part.name: part.domain().shards(tokenizer, folder) for part in recipe.data.domains}
    rows = RecoveryRows(recipe, tokenizer, shards)
    rows.training(1)  # raises now what a stage would raise later
    rows.held_out()
    return rows
