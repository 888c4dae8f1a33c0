"""Distillation and adapters: the loss against a naive one, and merging."""

import pytest
import torch

import crosslayer
from crosslayer.core.decoder import CrossLayerForCausalLM
from crosslayer.testing import tiny as contract
from crosslayer.training import distillation as teaching
from crosslayer.training.arguments import training_arguments
from crosslayer.training.distillation import Teacher, divergence
from crosslayer.training.recipe_parts import LoraPart
from crosslayer.training.stages import compensations, unfreeze
from crosslayer.training.trainer import CrossLayerTrainer
from tests.helpers.cases import CASES
from tests.helpers.recovery import healed, recipe_in
from tests.helpers.tiny import tiny, tokens
from tests.helpers.training import Random, course, losses, model_of

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


def distiller(folder, model, teacher, steps=2, **train):
    train = {"per_device_train_batch_size": 4, "use_cpu": True, "learning_rate": 1e-2, "logging_steps": 1, **train}
    arguments = training_arguments(folder, 0, course(steps), train)
    count = steps * train["per_device_train_batch_size"] * train.get("gradient_accumulation_steps", 1)
    return CrossLayerTrainer(model, arguments, Random(count), {"a": Random(2, seed=1)}, teacher=teacher)


def batch_of(count):
    items = [Random(count)[item] for item in range(count)]
    return {name: torch.stack([item[name] for item in items]) for name in items[0]}


def naive_loss(model, teacher, batch):
    """The formula, token by token, from full logits."""
    given = {name: batch[name] for name in ("input_ids", "position_ids")}
    own = model(**given, use_cache=False)
    with torch.no_grad():
        other = teacher.model(**given, use_cache=False)
    kls = []
    for row in range(len(batch["labels"])):
        for token in range(batch["labels"].shape[1] - 1):
            if batch["labels"][row, token + 1] == -100:
                continue
            p, q = other.logits[row, token].log_softmax(-1), own.logits[row, token].log_softmax(-1)
            kls.append((p.exp() * (p - q)).sum())
    return torch.stack(kls).mean()


def student_and_teacher(layers=3):
    original = tiny("llama", dtype=torch.float32)
    student = tiny("llama", dtype=torch.float32, num_hidden_layers=layers)
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.mul_(1.1)
    return student, Teacher(original)


@pytest.mark.parametrize("layers", [3, 2])
def test_the_loss_and_its_gradients_are_those_of_the_formula(layers, tmp_path):
    student, teacher = student_and_teacher(layers)
    trainer, batch = distiller(tmp_path, student, teacher), batch_of(3)
    results = []
    for loss in (trainer.compute_loss(student, dict(batch)), naive_loss(student, teacher, batch)):
        student.zero_grad()
        loss.backward()
        results.append((loss.detach(), {name: p.grad.clone() for name, p in student.named_parameters()}))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-5, atol=1e-6)
    for name, gradient in results[0][1].items():
        torch.testing.assert_close(gradient, results[1][1][name], rtol=1e-3, atol=1e-6, msg=name)
    assert all(parameter.grad is None for parameter in teacher.model.parameters())


def test_bfloat16_reaches_teacher_and_divergence(tmp_path, monkeypatch):
    """On a CPU too; the loss is near float32's."""
    seen, values = [], []
    for bf16 in (False, True):
        student, teacher = student_and_teacher()
        trainer = distiller(tmp_path / str(bf16), student, teacher, 2, bf16=bf16)
        hook = (
            teacher.model.get_decoder()
            .layers[0]
            .mlp.down_proj.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
        )
        monkeypatch.setattr(teaching, "divergence", watched(seen))
        trainer.train()
        hook.remove()
        values.append(losses(trainer)[1])
    assert seen == [torch.float32, False] * 2 + [torch.bfloat16, True] * 2
    assert values[1] == pytest.approx(values[0], rel=0.05) and values[1] != values[0]


def watched(seen):
    def call(*args):
        seen.append(torch.is_autocast_enabled("cpu"))
        return divergence(*args)

    return call


def test_accumulated_batches_are_weighted_by_their_tokens(tmp_path):
    """Two micro-batches of 2 rows give the gradient of a batch of 4, whose documents leave out different tokens."""
    rows = []
    for name, size, batches in (("whole", 4, 1), ("parts", 2, 2)):
        student, teacher = student_and_teacher()
        options = {"per_device_train_batch_size": size, "gradient_accumulation_steps": batches}
        trainer = distiller(tmp_path / name, student, teacher, 2, **options)
        trainer.train()
        rows.append(losses(trainer))
    assert rows[0] == pytest.approx(rows[1], rel=1e-5)


def test_the_original_itself_has_nothing_to_learn(tmp_path):
    original = tiny("llama", dtype=torch.float32)
    trainer = distiller(tmp_path, original, Teacher(original))
    assert trainer.compute_loss(original, batch_of(2)).item() == pytest.approx(0, abs=1e-6)


def test_distillation_learns_and_validates_on_the_text(tmp_path):
    student, teacher = student_and_teacher()
    trainer = distiller(tmp_path, student, teacher, 40, learning_rate=2e-3)
    trainer.train()
    curve = losses(trainer)
    assert curve[40] < 0.7 * curve[1]
    assert trainer.state.log_history[-1].get("eval_a_loss", trainer.evaluate()["eval_a_loss"]) > 1


def test_only_w_c_trains_in_its_stage():
    model = model_of([{"name": "uniattn", "superblocks": [[0, 1]], "compensation": "attention"}])
    assert len(compensations(model)) == 1
    unfreeze(model, "compensation")
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert names == ["model.layers.1.attn_compensation.weight"]
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == model.config.hidden_size**2
    unfreeze(model, "all")
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("case", ["llama", "cla", "uniattn", "drop compensated"])
def test_merged_adapters_compute_the_same(case):
    pytest.importorskip("peft")
    base, ids = contract.build(contract.config_of(*CASES[case][:1])), tokens(length=8)
    names = {name for name, _ in base.named_parameters()}
    model = unfreeze(base, "lora", LoraPart(rank=2, alpha=4)).double()
    assert all("lora_" in name for name, parameter in model.named_parameters() if parameter.requires_grad)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    with torch.no_grad():
        expected = model.eval()(ids, use_cache=False).logits
        whole = model.merge_and_unload(safe_merge=True)
        assert isinstance(whole, CrossLayerForCausalLM) and {name for name, _ in whole.named_parameters()} == names
        contract.close(expected, whole(ids, use_cache=False).logits, "merged", 1e-8)


@pytest.mark.slow  # float32 is trained every day
def test_distilling_retrofits_with_adapters_in_bfloat16(base, tmp_path):
    """The original is its own baseline, and a model without a whole layer learns too."""
    pytest.importorskip("peft")
    stage = {
        "parameters": "lora",
        "lora": {"rank": 4},
        "schedule": {"steps": 12, "minimum": 0},
        "train": {"learning_rate": 3e-3, "bf16": True},
    }
    recipe = recipe_in(tmp_path, stages=[stage], objective="distill")
    recovery = healed(base, "fitted shorter", tmp_path, recipe)
    assert recovery.trained_original is None and recovery.reference == "original"
    assert not (tmp_path / "out" / "original" / "model").exists()
    shorter = recovery.variants[1]
    before, after = (recovery.of("shorter", state, "KL").value for state in shorter.states)
    assert after < before
    assert shorter.states[1].run.parameters == "lora"
    model, _ = crosslayer.load_model(str(tmp_path / "out" / "shorter" / "model"))
    assert type(model).__name__ == "LlamaForCausalLM" and model.config.num_hidden_layers == 3
    assert healed(base, "fitted shorter", tmp_path, recipe, resume=True) == recovery
