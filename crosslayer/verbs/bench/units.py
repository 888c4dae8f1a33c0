"""How figures are written: shares, bytes, seconds, ratios."""

from crosslayer.verbs.bench.record import Comparison

BYTES = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}


def percent(share: float) -> str:
    """Write a share with three digits: 93.8 %."""
    return f"{100 * share:.3g} %"


def size(count: float) -> str:
    """Write a number of bytes with three digits: 23.6 MB."""
    unit = next((name for name in reversed(BYTES) if count >= BYTES[name]), "B")
    return f"{count / BYTES[unit]:.3g} {unit}"


def duration(seconds: float) -> str:
    """Write seconds with three digits, below 1 s as milliseconds."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def ratio(time: Comparison) -> str:
    """Write a ratio with its interval: 0.850x (0.812-0.893)."""
    interval = "" if time.interval is None else f" ({time.interval[0]:.3f}-{time.interval[1]:.3f})"
    return f"{time.ratio:.3f}x{interval}"


def span(ratios: list[float], digits: int) -> str:
    """Write the range of ratios: 0.85x, or 0.85x to 0.97x."""
    low, high = (f"{end:.{digits}f}x" for end in (min(ratios), max(ratios)))
    return low if low == high else f"{low} to {high}"
