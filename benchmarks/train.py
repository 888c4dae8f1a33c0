"""What a step of our trainer costs against a step of plain Trainer with LlamaForCausalLM.

    python benchmarks/train.py [--device cpu] [--pairs 40] [--batch 4] [--tokens 256] [--json FILE]

Both train the plain model of the same shape, on the same random ids, in turns of a single step, in an order that
alternates. A turn goes from the end of a step to the end of the next: it has everything, fetching the batch and writing
the log too, but for checkpoints. The ratio is taken pair by pair, its 95 % interval from order statistics.
"""

import argparse
import json
import tempfile
import threading
import time
from datetime import date
from pathlib import Path
from statistics import median

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from crosslayer.core.decoder import CrossLayerConfig, CrossLayerForCausalLM
from crosslayer.environment import environment
from crosslayer.stats.times import paired_ratio
from crosslayer.training.arguments import training_arguments
from crosslayer.training.initialise import initialise
from crosslayer.training.recipe_parts import SchedulePart
from crosslayer.training.trainer import CrossLayerTrainer

SHAPE = {
    "vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 2048,
}  # fmt: skip
WARMUP = 4  # pairs that do not count


class Ids(Dataset):
    """Random ids; item i is a function of i."""

    def __init__(self, items: int, length: int):
        self.items, self.length = items, length

    def __len__(self):
        return self.items

    def __getitem__(self, i):
        generator = torch.Generator().manual_seed(i)
        ids = torch.randint(0, SHAPE["vocab_size"], (self.length,), generator=generator)
        return {"input_ids": ids, "position_ids": torch.arange(self.length), "labels": ids}


class Turns(TrainerCallback):
    """Lets a trainer take a step when it is its turn, and times it."""

    def __init__(self, mine: threading.Semaphore, done: threading.Semaphore):
        self.mine, self.done, self.times, self.started = mine, done, [], None

    def on_train_begin(self, args, state, control, **kwargs):
        """Wait for the first turn."""
        self._wait()

    def on_step_end(self, args, state, control, **kwargs):
        """Note the time, and wait for the next turn."""
        self.times.append(time.perf_counter() - self.started)
        self.done.release()
        if state.global_step < state.max_steps:
            self._wait()

    def _wait(self):
        self.mine.acquire()
        self.started = time.perf_counter()


def ours(folder, steps, options):
    train = {"per_device_train_batch_size": options.batch, "save_strategy": "no", "use_cpu": options.device == "cpu"}
    model = CrossLayerForCausalLM(CrossLayerConfig(**SHAPE))
    initialise(model, 0)
    data = Ids(steps * options.batch, options.tokens)
    validation = Ids(1, options.tokens)
    schedule = SchedulePart(steps=steps).schedule_arguments(steps)
    return CrossLayerTrainer(model, training_arguments(folder, 0, schedule, train), data, validation)


def plain(folder, steps, options):
    arguments = TrainingArguments(
        str(folder),
        max_steps=steps,
        per_device_train_batch_size=options.batch,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        lr_scheduler_type="cosine",
        use_cpu=options.device == "cpu",
        dataloader_pin_memory=options.device != "cpu",
    )
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    initialise(model, 0)
    trainer = Trainer(model, arguments, train_dataset=Ids(steps * options.batch, options.tokens))
    trainer.remove_callback(PrinterCallback)
    return trainer


def in_turns(trainers, pairs):
    """Return the seconds of each step of each trainer, but for the first."""
    turns, done = [], threading.Semaphore(0)
    for trainer in trainers:
        turns.append(Turns(threading.Semaphore(0), done))
        trainer.add_callback(turns[-1])
        threading.Thread(target=trainer.train, daemon=True).start()
    for pair in range(WARMUP + pairs):
        for turn in turns if pair % 2 else turns[::-1]:
            turn.mine.release()
            done.acquire()
    return [turn.times[WARMUP:] for turn in turns]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "train.json")
    options = parser.parse_args()
    steps = WARMUP + options.pairs + 1  # none takes its last step, after which it would evaluate
    with tempfile.TemporaryDirectory() as folder:
        trainers = [ours(Path(folder) / "ours", steps, options), plain(Path(folder) / "plain", steps, options)]
        times = in_turns(trainers, options.pairs)
    ratio = paired_ratio(*times)
    seconds = [median(column) for column in times]
    print(f"step {ratio.text()} of plain Trainer's; {seconds[0]:.3f} s here")
    result = {
        "date": str(date.today()),
        "ratio": ratio.value,
        "ci95": ratio.interval,
        "seconds": seconds,
        "pairs": options.pairs,
        "batch": options.batch,
        "tokens": options.tokens,
        "device": options.device,
        "shape": SHAPE,
        **environment().model_dump(),
    }
    options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
