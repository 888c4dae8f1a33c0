"""Words that pages and sentences share: ranges of layers, and the text of a measure."""

from collections.abc import Iterable, Sequence


def ranges(numbers: Iterable[int]) -> str:
    """Return whole numbers in rising order, neighbours as a range: 7, 0, 1, 2 → "0-2, 7"."""
    ends: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if ends and number == ends[-1][1] + 1:
            ends[-1] = (ends[-1][0], number)
        else:
            ends.append((number, number))
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in ends)


def measured_on(sequences: int, length: int, text: str | None, documents: Sequence[int] | None) -> str:
    """Return on which text something was measured, and what the bands of the figures are.

    Args:
        sequences: how many there are.
        length: tokens of each.
        text: the name of the text; None for token ids.
        documents: the document that each sequence comes from, below 0 where it is joined from several.

    """
    windows = f"{sequences} sequences of {length} tokens, {text or 'own tokens'}"
    origin = f" · {_origin(documents)}" if documents else ""
    bands = "95 % Student-t intervals over sequences, which they take as independent, cut off at what is possible"
    return f"{windows}{origin} · bands: {bands}"


def _origin(documents: Sequence[int]) -> str:
    whole = len({number for number in documents if number >= 0})
    joined = sum(number < 0 for number in documents)
    words = []
    if whole:
        words.append(f"{whole} document{'s' if whole > 1 else ''}")
    if joined:
        words.append(f"{joined} joined from several documents")
    return f"from {' and '.join(words)}"
