"""The rows of a recovery: the same for every model that is trained, in the same order."""

from dataclasses import dataclass

from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerFast

from crosslayer.models.embedded import cache_folder
from crosslayer.output.progress import Meter, Silent
from crosslayer.verbs.heal.instructions import ExampleRows
from crosslayer.verbs.heal.recipe import HealDomainPart, HealRecipe
from crosslayer.verbs.train.mixture import Mixture, validation_windows, windows_of
from crosslayer.verbs.train.shards import Shards
from crosslayer.verbs.train.texts import DomainShards


@dataclass(frozen=True)
class RecoveryRows:
    """Text that is cut into tokens: rows to train on, and rows that are held out, by domain."""

    recipe: HealRecipe
    tokenizer: PreTrainedTokenizerFast
    shards: dict[str, DomainShards]

    def training(self, items: int) -> Mixture:
        """Return the rows of a stage, which always begin with the same.

        Raises:
            ValueError: a domain has less than a row; the message names it.

        """
        data = self.recipe.data
        rows = {part.name: self._examples(part, self.shards[part.name].training) for part in _tables(self.recipe)}
        texts = {name: parts.training for name, parts in self.shards.items()}
        weights = {part.name: part.weight for part in data.domains}
        return Mixture(texts, weights, data.length, self.recipe.seed, items, rows)

    def held_out(self) -> dict[str, Dataset[dict[str, Tensor]]]:
        """Return rows of each domain that nobody trains on, spread evenly over it.

        Raises:
            ValueError: a domain has less than a row; the message names it.

        """
        count, length = self.recipe.eval.held_out, self.recipe.data.length
        rows: dict[str, Dataset[dict[str, Tensor]]] = {}
        for part in self.recipe.data.domains:
            text = self.shards[part.name].validation
            if part.columns is None:
                rows[part.name] = validation_windows(text, length, min(count, windows_of(text, length, part.name)))
            else:
                rows[part.name] = _Spread(self._examples(part, text), count)
        return rows

    def left_out(self) -> dict[str, int]:
        """Return how many instructions of each domain are longer than a row."""
        return {
            part.name: self._examples(part, self.shards[part.name].training).left_out for part in _tables(self.recipe)
        }

    def _examples(self, part: HealDomainPart, text: Shards) -> ExampleRows:
        alone = self.recipe.objective.loss == "response"
        padding = self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else 0
        assert isinstance(padding, int)
        return ExampleRows(text, self.recipe.data.length, padding, part.name, alone)


class _Spread(Dataset[dict[str, Tensor]]):
    """So many of some rows, spread evenly over them."""

    def __init__(self, rows: ExampleRows, count: int):
        self.rows, self.count = rows, min(count, len(rows))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, item: int) -> dict[str, Tensor]:
        if not 0 <= item < self.count:
            raise IndexError(f"row {item} of {self.count}")
        return self.rows[len(self.rows) * item // self.count]


def read_rows(recipe: HealRecipe, tokenizer: PreTrainedTokenizerFast, meter: Meter = Silent) -> RecoveryRows:
    """Cut the text of a recipe into tokens, or take them out of the cache.

    Raises:
        ValueError: a source cannot be read, or has too little text; the message names the domain.

    """
    place = cache_folder() / "tokens"
    shards = {part.name: part.domain().shards(tokenizer, place, meter) for part in recipe.data.domains}
    rows = RecoveryRows(recipe, tokenizer, shards)
    rows.training(1)  # says now what a stage would say later
    rows.held_out()
    return rows


def _tables(recipe: HealRecipe) -> list[HealDomainPart]:
    return [part for part in recipe.data.domains if part.columns is not None]
