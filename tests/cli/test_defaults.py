"""What the command line does by default is what Python does by default, option by option."""

import inspect

import pytest
import typer

import crosslayer
from crosslayer import cli
from crosslayer.benchmark.settings import Settings
from crosslayer.cli import (
    bench,
    compare,
    diagnose,
    eval,
    export,
    generate,
    heal,
    intervene,
    methods,
    needles,
    options,
    plan,
    push,
    retrofit,
    serve,
    train,
    verify,
)
from crosslayer.conversion.options import RetrofitOptions
from crosslayer.corpus.documents import TextSource
from crosslayer.evaluation.record import Settings as EvaluationSettings
from crosslayer.generation.sampling import Sampling
from crosslayer.intervention.request import Request
from crosslayer.needles.options import NeedleOptions

CALLS = {
    diagnose: crosslayer.diagnose,
    intervene: crosslayer.effect,
    retrofit: crosslayer.retrofit,
    verify: crosslayer.verify,
    bench: crosslayer.bench,
    eval: crosslayer.evaluate,
    generate: crosslayer.generate,
    export: crosslayer.export,
    push: crosslayer.push,
    plan: crosslayer.read_plan,
    train: crosslayer.train,
    heal: crosslayer.heal,
    compare: crosslayer.compare,
    needles: crosslayer.find_needles,
}
MODELS = {crosslayer.effect: Request, crosslayer.retrofit: RetrofitOptions, crosslayer.bench: Settings,
          crosslayer.evaluate: EvaluationSettings, crosslayer.generate: Sampling,
          crosslayer.find_needles: NeedleOptions}  # fmt: skip
ALONE = {"debug", "allow_methods", "out", "force"}  # of the command line, beside `remote_code_shim`, of `save`
KINDS = {"waiver", "forbid", "scale_values", "position_swap", "token_swap", "ablate", "file", "layers"}
NAMES = {  # where a command's option goes by another name in Python
    bench: {"model": "candidate", "context": "contexts", "batch": "batches"},
    generate: {"max_new_tokens": "new_tokens"},
}
OTHER_DTYPES = (plan, export)  # of a cache, and of a file: not of a model that runs
SHARED = {
    "seed": options.Seed,
    "bos": options.Bos,
    "device": options.Device,
    "dtype": options.Dtype,
    "force": options.Force,
    "debug": options.Debug,
    "allow_methods": options.AllowMethods,
    "config": options.Config,
    "split": options.Split,
    "column": options.Column,
    "sequences": options.Sequences,
}
PYTHON = {  # no options
    "tokenizer", "progress", "settings", "write", "folder", "compile_backend", "interventions", "command",
}  # fmt: skip


def defaults(call) -> dict:
    return {name: parameter.default for name, parameter in inspect.signature(call).parameters.items()}


def in_python(value):
    """Return what becomes of a text with commas."""
    if isinstance(value, str) and "," in value or value == "1":
        return tuple(int(word) if word.isdecimal() else word for word in value.split(","))
    return value


@pytest.mark.parametrize("verb", CALLS, ids=lambda verb: verb.__name__.rpartition(".")[2])
def test_defaults_are_the_same(verb):
    expected, names = defaults(CALLS[verb]), NAMES.get(verb, {})
    shell = {name: default for name, default in defaults(verb.command).items() if name not in ALONE}
    for name, default in vars(TextSource()).items():
        if name != "name" and name in shell:
            assert shell.pop(name) == default, name
    if verb is intervene:
        assert all(shell.pop(kind) is None for kind in KINDS)
    if verb in (train, heal, compare):
        assert not shell.pop("set_") and not expected["settings"]
    if verb is bench:  # another engine is another call
        assert (shell.pop("engine"), shell.pop("kv_memory")) == ("transformers", None)
    if verb is retrofit:
        assert shell.pop("heal") is None  # another verb
        assert shell.pop("remote_code_shim") is defaults(crosslayer.Receipt.save)["remote_code_shim"]
    shell = {names.get(name, name): in_python(default) for name, default in shell.items()}
    assert shell == {name: default for name, default in expected.items() if name not in PYTHON | ALONE}


@pytest.mark.parametrize("call", MODELS, ids=lambda call: call.__name__)
def test_the_options_of_a_verb_are_those_of_its_call(call):
    """Fields of the checked options have the defaults of the call, where they have any."""
    expected = defaults(call)
    for name, field in MODELS[call].model_fields.items():
        assert name in expected, name
        assert field.is_required() or field.default == expected[name], name


def test_an_option_that_verbs_share_is_the_same_in_all():
    """The same name is the same type, with the same help, and the same default."""
    seen: dict = {}
    for verb in (*(verb for verb in CALLS if verb not in OTHER_DTYPES), methods):
        for parameter in inspect.signature(verb.command).parameters.values():
            seen.setdefault(parameter.name, []).append((verb, parameter))
    for name in SHARED:
        assert len(seen[name]) > 1
        assert all(parameter.annotation is SHARED[name] for _, parameter in seen[name]), name
        assert len({parameter.default for _, parameter in seen[name]}) == 1, name


def test_what_is_measured_in_vllm_has_the_defaults_of_its_call():
    shell, expected = defaults(bench.command), defaults(crosslayer.bench_vllm)
    assert [shell[name] for name in ("new_tokens", "repeats", "seed", "dtype")] == [
        expected[name] for name in ("new_tokens", "repeats", "seed", "dtype")
    ]


def test_every_verb_is_compared():
    verbs = set(typer.main.get_command(cli.app).commands)
    assert verbs == {
        verb.__name__.rpartition(".")[2] for verb in (*CALLS, methods, serve)
    }  # vLLM itself serves from Python
