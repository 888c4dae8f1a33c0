"""Reading the coded streams of all layers and blocks: on a CPU one after another, on a GPU all at once.

Each stream is read symbol by symbol, so a GPU is busy only with many of them.

Shapes: R channels of a layer, T tokens.
"""

import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from crosslayer.codec.entropy import Coder, Part, words_of
from crosslayer.core.custom_ops import triton_kernels

MOST = 2**27  # coefficients that a GPU reads together, 512 MiB


class Streams:
    """Reads what the coders of a codec's layers wrote."""

    def __init__(self, coders: Sequence[Coder]):
        self.coders = coders
        self.tables = cache(self._tables)
        self.kernel_runs = True

    def read(self, layers: Sequence[Sequence[Part]], device: torch.device) -> Iterator[Tensor]:
        """Yield the coefficients (R, T) of each layer, from the codes of its blocks.

        On a CPU, one thread reads those of a layer while the caller computes with those of the layer before.

        Raises:
            ValueError: a code does not hold the symbols of its tokens.

        """
        kernel, done = triton_kernels("ans", device), 0
        while kernel is not None and self.kernel_runs and done < len(layers):
            count = self._together(layers[done:], done)
            try:
                found = self.read_at_once(layers[done : done + count], device, kernel, done)
            except ValueError:
                raise
            except Exception as error:  # no compiler, no memory: Triton has exceptions of its own
                self.kernel_runs = False
                warnings.warn(f"stored prompts are decoded on the CPU: {error}", RuntimeWarning, stacklevel=2)
                break
            yield from found
            done += count
        if done < len(layers):
            with ThreadPoolExecutor(1) as pool:
                for coefficients in pool.map(Coder.decode_parts, self.coders[done:], layers[done:]):
                    yield torch.from_numpy(coefficients).to(device)

    def _together(self, layers: Sequence[Sequence[Part]], first: int) -> int:
        """Return how many layers from `first` on have at most `MOST` coefficients; at least one."""
        sizes = [self.coders[first + at].channels * tokens_of(parts) for at, parts in enumerate(layers)]
        return max(1, int((np.cumsum(sizes) <= MOST).sum()))

    def read_at_once(
        self, layers: Sequence[Sequence[Part]], device: torch.device, kernel: ModuleType, first: int = 0
    ) -> list[Tensor]:
        """Return the coefficients (R, T) of each layer from `first` on, read by a kernel, a program for each code."""
        first_run, tables = self.tables(device)
        words, escaped, streams = [], [], []
        word = code = position = 0
        coders = self.coders[first : first + len(layers)]
        shapes = [(coder.channels, tokens_of(parts)) for coder, parts in zip(coders, layers, strict=True)]
        for index, (channels, tokens) in enumerate(shapes):
            at = position
            for data, count in layers[index]:
                own, rest = words_of(data)
                bounds = word, word + len(own), code, code + len(rest)
                streams.append((*bounds, count, *first_run[first + index : first + index + 2], at, tokens))
                word, code, at = word + len(own), code + len(rest), at + count
                words.append(own)
                escaped.append(rest)
            position += channels * tokens
        facts = torch.tensor(streams, device=device)
        out = torch.empty(position, dtype=torch.float32, device=device)
        ended = kernel.decode(_moved(words, "<i4", device), _moved(escaped, "<i2", device), facts, tables, out)
        if not torch.equal(ended, facts[:, 3]):
            raise ValueError("the code of a layer has too few or too many escaped codes")
        parts = out.split([channels * tokens for channels, tokens in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def _tables(self, device: torch.device) -> tuple[list[int], tuple[Tensor, Tensor, Tensor]]:
        """Return the first run of each layer, and on a device the runs, the sums of frequencies, and the values."""
        begins: dict[int, int] = {}
        starts, values, runs, first_run = [], [], [], [0]
        for coder in self.coders:
            for (number, table), (_, first, last) in zip(coder.tables.items(), coder.runs, strict=True):
                if number not in begins:
                    begins[number] = sum(map(len, starts))
                    starts.append(np.cumsum([0, *table.of_symbols()]))
                    values.append([*table.values, 0.0])  # as long as `starts`
                runs.append((begins[number], len(table.values), first, last))
            first_run.append(len(runs))
        tensors = torch.tensor(runs), torch.from_numpy(np.concatenate(starts)), torch.from_numpy(np.concatenate(values))
        return first_run, (tensors[0].int().to(device), tensors[1].int().to(device), tensors[2].float().to(device))


def tokens_of(parts: Sequence[Part]) -> int:
    """Return the tokens of a layer's parts together."""
    return sum(count for _, count in parts)


def _moved(parts: Sequence[np.ndarray], dtype: str, device: torch.device) -> Tensor:
    """Return parts one behind the other on a device, and a zero behind them."""
    return torch.from_numpy(np.concatenate([*parts, [0]], dtype=dtype, casting="unsafe")).to(device)
