"""Trains a tiny model that is repeatedly killed while saving: `python -m tests.verbs.train.killed FOLDER`."""

import os
import random
import signal
import sys
import time
from pathlib import Path

from safetensors.torch import load_file

from crosslayer.training.checkpoints import PARTIAL, checkpoints, last_good
from tests.helpers.training import course, model_of, trainer_of

TIMES = 20
STEPS = 100_000  # more than are done


def train(folder: Path, steps: int) -> None:
    """Train in a process of its own, which is this one's child; it never comes back."""
    model = model_of(hidden_size=256, intermediate_size=512)  # 8 MB with the optimizer's states: saving takes a while
    trainer_of(folder, model, schedule=course(steps), save_steps=1, logging_steps=10**6).train(True)
    os._exit(0)


def main(folder: Path) -> None:
    """Kill `TIMES` times; after each, the last good checkpoint is there, loads, and is not older than before."""
    chance, newest, amid = random.Random(0), 0, 0
    for _ in range(TIMES):
        child = os.fork()
        if child == 0:
            train(folder, STEPS)
        while max(checkpoints(folder), default=0) <= newest:
            assert os.waitpid(child, os.WNOHANG) == (0, 0), "training ended by itself"
            time.sleep(0.001)
        time.sleep(chance.uniform(0.0, 0.1))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        amid += (folder / PARTIAL).exists()
        good = last_good(folder)
        assert good is not None and int(good.name.removeprefix("checkpoint-")) > newest
        assert load_file(good / "model.safetensors")
        newest = int(good.name.removeprefix("checkpoint-"))
    print(amid)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
