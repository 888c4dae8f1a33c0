"""Losses of windows that a test makes up."""

import numpy as np

from crosslayer.judge.damage import Losses


def losses_of(before, after, kl, documents, domains=(), changed=None):
    """Losses whose arrays are (N,); by default no most likely token changes."""
    means = {"before": before, "after": after, "kl": kl, "changed": np.zeros(len(kl)) if changed is None else changed}
    return Losses(means, tuple(documents), tuple(domains))
