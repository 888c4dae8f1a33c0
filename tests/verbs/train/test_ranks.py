"""Two ranks train as one: DDP and FSDP2, on gloo."""

import json
import os
import shutil
import socket
import subprocess
import sys

import pytest
import torch.distributed as dist
import torch.multiprocessing as mp
from accelerate.state import DistributedType, PartialState
from safetensors.torch import load_file
from transformers import TrainingArguments
from transformers.training_args import ParallelMode

from crosslayer.results import load_result
from crosslayer.training.checkpoints import checkpoints, last_good
from tests.helpers.training import STEPS, Random, Stop, losses, model_of, trainer_of

KINDS = {"ddp": {}, "fsdp2": {"fsdp": True}}


def run(folder, size, **train):
    """Train in two halves, the second resumed, and return the trainer; validation windows come out even on no rank."""
    for stop in (3, None):
        model = model_of(["attnres"], attention_dropout=0.0).double()
        validation = {"a": Random(7, seed=1)}
        trainer = trainer_of(
            folder,
            model,
            Random(STEPS * 8),
            validation,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=2,
            per_device_eval_batch_size=2,
            **train,
        )
        if stop is not None:
            trainer.add_callback(Stop(stop))
        trainer.train(True)
    trainer.save_model(str(folder / "model"))
    return trainer


def results(trainer):
    windows = {name: values.tolist() for name, values in trainer.window_losses.items()}
    final = next(line["eval_a_loss"] for line in trainer.state.log_history if "eval_a_loss" in line)
    norms = [value for line in trainer.state.log_history for key, value in line.items() if "grad_norm" in key]
    return {"losses": list(losses(trainer).values()), "windows": windows, "final": final, "norms": norms}


def shard_on_cpus():
    """Make accelerate shard models on CPUs, which PyTorch can do but accelerate does only on other devices."""
    original = PartialState.__init__

    def renamed(self, *args, **kwargs):
        original(self, *args, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_XPU

    PartialState.__init__ = renamed


def worker(rank, port, kind, folder):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    if kind == "fsdp2":
        shard_on_cpus()
    trainer = run(folder, 2, ddp_backend="gloo", **KINDS[kind])
    assert trainer.is_fsdp_enabled == (kind == "fsdp2")
    if rank == 0:
        (folder / "results.json").write_text(json.dumps(results(trainer)))
    dist.barrier()
    os._exit(0)  # gloo's threads may still run when the interpreter takes its modules down, which aborts


def test_sharding_that_does_nothing_is_refused(tmp_path, monkeypatch):
    """Accelerate ignores it where ranks are CPUs; for a single process it raises an error itself."""
    monkeypatch.setattr(TrainingArguments, "parallel_mode", ParallelMode.DISTRIBUTED)
    with pytest.raises(ValueError, match="train.fsdp"):
        trainer_of(tmp_path, fsdp=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_train_as_one(kind, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (tmp_path / "two").mkdir()
    mp.spawn(worker, (port, kind, tmp_path / "two"), nprocs=2)
    two = json.loads((tmp_path / "two" / "results.json").read_text())
    one = results(run(tmp_path / "one", 4))
    assert two["losses"] == pytest.approx(one["losses"], abs=1e-5)
    assert len(two["norms"]) == STEPS
    assert two["norms"] == pytest.approx(one["norms"], abs=1e-5)
    assert two["final"] == pytest.approx(one["final"], abs=1e-5)
    assert two["windows"]["eval_a_loss"] == pytest.approx(one["windows"]["eval_a_loss"], abs=1e-5)
    assert list(checkpoints(tmp_path / "two")) == [STEPS - 2, STEPS] and last_good(tmp_path / "two") is not None
    sharded = (tmp_path / "two" / f"checkpoint-{STEPS}" / "pytorch_model_fsdp_0").is_dir()
    assert sharded == (kind == "fsdp2")
    weights, expected = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("two", "one"))
    assert set(weights) == set(expected)
    for name, weight in expected.items():
        assert (weights[name] - weight).abs().max() < 1e-5, name


RECIPE = """
model: {size: tiny, shape: {num_hidden_layers: 2}, method: resformer}
data: {length: 32, domains: [{name: books}, {name: web}]}
schedule: {steps: 5}
train: {per_device_eval_batch_size: 2, learning_rate: 3e-3, logging_steps: 2, use_cpu: true}
eval: {windows: 3}
"""


@pytest.mark.slow
def test_torchrun_gives_a_run_as_of_one_process(tmp_path):
    recipe, outputs = tmp_path / "little.yaml", {}
    recipe.write_text(RECIPE)
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    for name, words, size in (("two", launcher, 2), ("one", [], 4)):
        command = [sys.executable, "-m", *words, "crosslayer", "train", recipe, "--out", tmp_path / name]
        command += ["--set", f"train.per_device_train_batch_size={size}"]
        process = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=300)
        assert process.returncode == 0, process.stderr[-3000:]
        outputs[name] = process.stdout.splitlines()
    assert len(outputs["two"]) == len(outputs["one"])  # one process prints
    one, two = (load_result(tmp_path / name) for name in ("one", "two"))
    assert two.steps == one.steps == 5 and two.tokens == one.tokens
    assert two.curve.steps == [2, 4, 5]
    assert two.curve.losses == pytest.approx(one.curve.losses, abs=1e-5)  # float32; sums run in another order
    for entry, other in zip(two.validation, one.validation, strict=True):
        assert entry.losses == pytest.approx(other.losses, abs=1e-5)


@pytest.mark.slow
def test_two_processes_resume_with_the_batch_of_one(tmp_path):
    """They would read twice as many rows per step, which is refused, unless the accumulation is halved."""
    recipe = tmp_path / "little.yaml"
    recipe.write_text(RECIPE)
    fixed = ["train.per_device_train_batch_size=2", "train.save_steps=2"]

    def train(processes, accumulated):
        launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m"]
        command = [
            sys.executable,
            "-m",
            *launcher,
            "crosslayer",
            "train",
            recipe,
            "--out",
            tmp_path / "run",
            "--resume",
        ]
        settings = [*fixed, f"train.gradient_accumulation_steps={accumulated}"]
        command += [word for setting in settings for word in ("--set", setting)]
        return subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=300)

    assert train(1, 2).returncode == 0
    whole = load_result(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoint-5")
    (tmp_path / "run" / "record.json").unlink()
    refused = train(2, 2)
    assert refused.returncode != 0 and not (tmp_path / "run" / "record.json").exists()
    line = "must be 4 sequences per step as in checkpoint-4, got 8; set train.gradient_accumulation_steps=1"
    assert line in refused.stderr
    assert train(2, 1).returncode == 0
    resumed = load_result(tmp_path / "run")
    assert resumed.tokens == whole.tokens and resumed.curve.steps == whole.curve.steps
    assert resumed.curve.losses == pytest.approx(whole.curve.losses, abs=1e-5)
    for entry, other in zip(resumed.validation, whole.validation, strict=True):
        assert entry.losses == pytest.approx(other.losses, abs=1e-5)


@pytest.mark.slow
def test_two_nodes_give_a_run_as_of_one_process(tmp_path):
    """Two groups of processes, as on two machines that see one folder, each with tokens of its own."""
    recipe = tmp_path / "little.yaml"
    recipe.write_text(RECIPE)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launcher = ["torch.distributed.run", "--nnodes", 2, "--nproc-per-node", 1, "--master-addr", "127.0.0.1"]
    command = [sys.executable, "-m", *launcher, "--master-port", port]
    train = ["crosslayer", "train", recipe, "--set", "train.per_device_train_batch_size=2", "--out"]
    nodes = []
    for node in range(2):
        words = [*command, "--node-rank", node, "-m", *train, tmp_path / "two"]
        own = {**os.environ, "CROSSLAYER_CACHE": str(tmp_path / f"cache{node}")}
        nodes.append(subprocess.Popen([*map(str, words)], env=own, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
    ended = [(node.communicate(timeout=300), node.returncode) for node in nodes]
    assert [code for _, code in ended] == [0, 0], [output[1].decode()[-2000:] for output, _ in ended]
    assert [bool(output[0].strip()) for output, _ in ended] == [True, False]  # the first node prints
    subprocess.run(
        [*map(str, [sys.executable, "-m", *train, tmp_path / "one", "--set", "train.gradient_accumulation_steps=2"])],
        check=True,
        capture_output=True,
        timeout=300,
    )
    one, two = (load_result(tmp_path / name) for name in ("one", "two"))
    assert two.steps == one.steps == 5 and two.tokens == one.tokens
    assert two.curve.losses == pytest.approx(one.curve.losses, abs=1e-5)
    for entry, other in zip(two.validation, one.validation, strict=True):
        assert entry.losses == pytest.approx(other.losses, abs=1e-5)
