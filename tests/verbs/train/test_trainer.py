"""The trainer: weight decay, the learning rate, exact losses, exact resuming, the log, and the saved model."""

import json
import math

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, TrainingArguments

from crosslayer.core.decoder import CrossLayerForCausalLM
from crosslayer.output.progress import metered_by
from crosslayer.training import costs
from crosslayer.training.checkpoints import checkpoints
from crosslayer.training.trainer import TrainingStopped
from tests.helpers.cases import CASES, each
from tests.helpers.daily import daily
from tests.helpers.training import LENGTH, STEPS, Random, Stop, course, losses, model_of, trainer_of


def log_of(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run from start to end: its trainer and folder."""
    folder = tmp_path_factory.mktemp("whole")
    trainer = trainer_of(folder, gradient_accumulation_steps=2, data=Random(STEPS * 8))
    trainer.train()
    return trainer, folder


@pytest.mark.parametrize("stops", daily([(1,), (2,), (5,), (3, 6), (2, 7)], (3, 6)), ids=str)
def test_a_resumed_run_has_the_same_losses_bit_for_bit(stops, whole, tmp_path):
    """With dropout, clipping, accumulation, a warm-up; from the last checkpoint before the stop, or from the start."""
    for stop in (*stops, None):
        trainer = trainer_of(tmp_path, gradient_accumulation_steps=2, data=Random(STEPS * 8))
        if stop is not None:
            trainer.add_callback(Stop(stop))
        trainer.train(resume_from_checkpoint=True)
    assert losses(trainer) == losses(whole[0])
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, whole[0].model.get_parameter(name)), name
    kept = ("step", "loss", "grad_norm", "learning_rate", "tokens", "eval_a_loss")
    lines = [[{key: line.get(key) for key in kept} for line in log_of(folder)] for folder in (tmp_path, whole[1])]
    assert lines[0] == lines[1]


def test_the_log_has_every_step_and_the_rate_follows_the_cosine(whole):
    trainer, folder = whole
    lines = log_of(folder)
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    for line in steps:
        step = line["step"] - 1  # the logged rate is that of the next step
        down = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (step - 1) / (STEPS - 2)))
        assert line["learning_rate"] == pytest.approx(1e-2 * ((step + 1) / 2 if step < 2 else down))
        assert line["tokens"] == line["step"] * 8 * LENGTH
        assert line["tokens_per_second"] > 0
    assert [line["step"] for line in lines if "eval_a_loss" in line] == [STEPS]
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert list(checkpoints(folder)) == [STEPS - 2, STEPS]


def test_validation_is_the_mean_over_tokens_for_any_batch(whole):
    trainer, _ = whole
    data = Random(6, seed=1)
    sums, counts = [], []
    for item in map(data.__getitem__, range(len(data))):
        with torch.no_grad():
            logits = trainer.model.eval()(
                item["input_ids"][None], position_ids=item["position_ids"][None], use_cache=False
            ).logits[0]
        sums.append(functional.cross_entropy(logits[:-1], item["labels"][1:], reduction="sum").item())
        counts.append(item["labels"][1:].ne(-100).sum().item())
    for size in (1, 4, 6):
        trainer.args.per_device_eval_batch_size = size
        metrics = trainer.evaluate({"b": data})
        assert metrics["eval_b_loss"] == pytest.approx(sum(sums) / sum(counts), rel=1e-6)
        windows = [a / b for a, b in zip(sums, counts, strict=True)]
        assert trainer.window_losses["eval_b_loss"].tolist() == pytest.approx(windows, rel=1e-5)


def test_documents_in_a_row_are_separate(tmp_path):
    """Though the model's own setting, and what is saved, is to use a cache, which would join them."""
    model = model_of(attention_dropout=0.0)
    trainer = trainer_of(tmp_path, model, data=Random(STEPS * 4))
    assert model.config.use_cache is True
    item = Random(1)[0]
    losses = []
    for part in (slice(None, 3), slice(3, None)):
        ids = item["input_ids"][None, part]
        losses.append(model(ids, labels=ids, use_cache=False).loss * (ids.shape[1] - 1))
    batch = {name: tensor[None] for name, tensor in item.items()}
    expected = sum(losses) / (LENGTH - 2)
    assert trainer.compute_loss(model, batch).item() == pytest.approx(expected.item(), rel=1e-5)
    assert trainer.evaluate(Random(1))["eval_loss"] == pytest.approx(expected.item(), rel=1e-5)


def test_the_model_is_saved_as_transformers_loads_it(whole, tmp_path):
    trainer, folder = whole
    trainer.save_model(str(tmp_path / "model"))
    assert {path.name for path in (tmp_path / "model").iterdir()} <= {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
    }
    for path in (tmp_path / "model", folder / f"checkpoint-{STEPS}"):
        assert {file.stat().st_mode & 0o777 for file in path.iterdir()} == {path.stat().st_mode & 0o666}  # the umask's
        loaded = AutoModelForCausalLM.from_pretrained(path)
        assert type(loaded) is CrossLayerForCausalLM and loaded.config.use_cache is True
        for name, parameter in loaded.named_parameters():
            assert torch.equal(parameter, trainer.model.get_parameter(name)), name


@pytest.mark.parametrize("case", each(CASES))
def test_mixing_weights_of_methods_have_no_weight_decay(case, tmp_path):
    methods, changes = CASES[case]
    model = model_of(methods, **{"num_hidden_layers": 6, **changes})
    decayed = set(trainer_of(tmp_path, model).get_decay_parameter_names(model))
    for name, parameter in model.named_parameters():
        own = "_residual." in name or ".mixers." in name or ".reader." in name
        assert (name in decayed) == (parameter.ndim > 1 and not own and "norm" not in name), name


def test_a_linear_layer_inside_a_mixing_module_decays(tmp_path):
    model = model_of(["attnres"])
    residual = model.model.final_residual
    residual.map = torch.nn.Linear(3, 2)
    names = trainer_of(tmp_path, model).get_decay_parameter_names(model)
    assert [name for name in names if "final_residual" in name] == ["model.final_residual.map.weight"]


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path):
    """Row 26 is in the second half of step 4, whose batches are rows 24 to 25 and 26 to 27."""

    class Poisoned(Random):
        def __getitem__(self, i):
            item = super().__getitem__(i)
            item["input_ids"][0] = 2 if i == 26 else 3
            return item

    model = model_of()
    with torch.no_grad():
        model.model.embed_tokens.weight[2] = math.nan
    size = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "save_steps": 1}
    trainer = trainer_of(tmp_path, model, Poisoned(STEPS * 8), **size)
    text = "the loss is nan at step 4, in rows 26 to 27 of the training data; .*last good checkpoint is checkpoint-3$"
    with pytest.raises(TrainingStopped, match=text) as stopped:
        trainer.train()
    assert stopped.value.step == 4 and stopped.value.checkpoint == tmp_path / "checkpoint-3"
    assert [line["step"] for line in log_of(tmp_path)] == [1, 2, 3]


def test_a_gradient_that_is_not_finite_ends_the_run_before_the_step(tmp_path):
    """The loss is finite, and the next checkpoint would hold weights that are not."""
    model = model_of()
    calls = []

    def explode(gradient):
        calls.append(gradient)
        return gradient * math.inf if len(calls) == 3 else gradient

    model.lm_head.weight.register_hook(explode)
    trainer = trainer_of(tmp_path, model, save_steps=1)
    text = "the gradient's norm is (inf|nan) at step 3, in rows 8 to 11 of .* the last good checkpoint is checkpoint-2$"
    with pytest.raises(TrainingStopped, match=text):
        trainer.train()
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_progress_is_shown(tmp_path):
    shown = []

    class Meter:
        def __init__(self, what, total):
            shown.append((what, total))

        def __enter__(self):
            return self

        def __exit__(self, *_):
            shown.append("end")

        def step(self, done, total, doing=""):
            shown.append((done, total, doing.partition(" ")[0]))

    with metered_by(Meter):
        trainer_of(tmp_path, schedule=course(3), logging_steps=2).train()
    assert shown == [("training", 3), (1, 3, ""), (2, 3, "loss"), (3, 3, "loss"), "end"]


WAYS = {
    "checkpointed": ({"activation_checkpointing": True}, 1e-6),
    "compiled": ({"torch_compile": True, "torch_compile_backend": "eager"}, 1e-6),
    "workers": ({"dataloader_num_workers": 2}, 0.0),
    "accumulated": ({"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}, 1e-5),
    "bfloat16": ({"bf16": True}, 2e-2),
}


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_train_gives_the_same_losses(way, tmp_path):
    arguments, tolerance = WAYS[way]
    runs = []
    for name, more in (("plain", {}), (way, arguments)):
        model = model_of(["attnres"], attention_dropout=0.0)
        runs.append(trainer_of(tmp_path / name, model, Random(12), schedule=course(3), **more))
        runs[-1].train()
    plain, other = map(losses, runs)
    assert other == pytest.approx(plain, abs=tolerance)
    if way == "bfloat16":
        assert other != plain


@pytest.mark.parametrize("more", [{}, {"bf16": True}], ids=str)
def test_a_batch_with_too_many_logits_trains_and_is_evaluated_in_chunks(more, tmp_path, monkeypatch):
    runs, seen = [], []
    for name, bound in (("all", 2**30), ("none", 0)):
        monkeypatch.setattr(costs, "LOGITS", bound)
        model = model_of(["resformer"], attention_dropout=0.0, final_logit_softcapping=3.0)
        model.lm_head.register_forward_hook(lambda _, __, logits, to=seen: to.append(logits.shape[:-1]))
        more = {**more, "per_device_eval_batch_size": 1}
        runs.append(trainer_of(tmp_path / name, model, Random(12), schedule=course(3), **more))
        runs[-1].train()
    assert {len(shape) for shape in seen} == {1, 2}  # of a chunk, and of a batch
    assert losses(runs[1]) == pytest.approx(losses(runs[0]), abs=1e-6 if "bf16" not in more else 2e-3)
    for window, other in zip(*(run.window_losses["eval_a_loss"] for run in runs), strict=True):
        assert window == pytest.approx(other, rel=1e-5 if "bf16" not in more else 2e-3)


def test_several_gpus_in_a_single_process_are_refused(tmp_path, monkeypatch):
    """Trainer would distribute a batch over them, and read more rows per step than the run has."""
    monkeypatch.setattr(TrainingArguments, "n_gpu", property(lambda _: 2))
    with pytest.raises(ValueError, match="process.*GPU,.*2;.*torchrun"):
        trainer_of(tmp_path)


def test_data_that_end_before_the_last_step_are_refused(tmp_path):
    """Trainer would start again at the first row."""
    text = "training data must have 64 rows for 8 steps, got 63"
    with pytest.raises(ValueError, match=text):
        trainer_of(tmp_path, data=Random(STEPS * 8 - 1), gradient_accumulation_steps=2)
