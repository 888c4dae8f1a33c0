"""What a user may type wrong: each case ends with its exit status and one line, and leaves nothing behind."""

import shlex
import sys

import pytest

from crosslayer import cli
from tests.helpers import broken

# What is appended where the command does not name it, so that every case is quick.
USUAL = {
    "diagnose": "--text {kit}/text.txt --sequences 2 --length 16 --out out",
    "intervene": "--text {kit}/text.txt --sequences 2 --length 16 --out out",
    "retrofit": "--text {kit}/text.txt --windows 32 --length 16 --calibration 16 --out out",
    "bench": "--context 8 --new-tokens 2 --repeats 1 --out out",
    "verify": "--out out",
    "generate": "",
    "methods": "",
}
MEND, FAULT = 2, 70
CASES = [
    # what every verb shares
    ("", MEND, ""),
    ("diagnoze x", MEND, "No such command 'diagnoze'"),
    ("--colour", MEND, "No such option: --colour"),
    ("diagnose", MEND, "Missing argument 'model'"),
    ("diagnose {kit}/model --colour red", MEND, "No such option: --colour"),
    ("diagnose {kit}/model extra", MEND, "unexpected extra argument"),
    ("verify {kit}/model --out out --dtypes", MEND, "requires an argument"),
    ("diagnose {kit}/model --length ten", MEND, "'--length'.*'ten'|'--length'.*valid integer"),
    ("diagnose {kit}/model --length 1", MEND, "'--length'.*greater than or equal to 2"),
    ("diagnose {kit}/model --sequences 0", MEND, "'--sequences'.*greater than or equal to 1"),
    ("diagnose {kit}/model --sequences 1e3", MEND, "'--sequences'"),
    ("diagnose {kit}/model --seed 100000000000000000000000", MEND, "'--seed'.*less than or equal to"),
    ("diagnose {kit}/model --seed -1", MEND, "'--seed'.*greater than or equal to 0"),
    ("diagnose {kit}/model --config en", MEND, "--config en does nothing, since the text is no dataset of the hub"),
    ("intervene {kit}/model --waiver 3 --split test", MEND, "--split test does nothing"),
    ("retrofit {kit}/model --method cla --column body", MEND, "--column body does nothing, since the text is no table"),
    ("diagnose {kit}/model --bos maybe", MEND, "use auto, yes or no"),
    ("diagnose {kit}/model --bos yes", MEND, "no beginning-of-sequence token"),
    ("diagnose {kit}/model --dtype int3", MEND, "'int3' is not known; use float32"),
    ("diagnose {kit}/model --device abacus", MEND, "device 'abacus' cannot be used here"),
    ("diagnose {kit}/model --device meta", MEND, "device 'meta' cannot be used here"),
    ("diagnose {kit}/model --device cpu:9:9", MEND, "device 'cpu:9:9' cannot be used here"),
    ("diagnose {kit}/model --out {kit}/text.txt", MEND, "is a file; name a folder"),
    ("diagnose {kit}/model --out {kit}/model", MEND, "exists; give another name, or --force"),
    ("diagnose {kit}/model --out {kit}/model --force", MEND, "holds more than crosslayer wrote"),
    ("diagnose {kit}/model --out /proc/nothing/here", MEND, "cannot be written"),
    ("diagnose {kit}/model --out /dev/null", MEND, "is a file; name a folder"),
    ("diagnose {kit}/model --out {long}", MEND, "File name too long"),
    ("diagnose {kit}/model --out {undecodable}", MEND, r"argument 4 is b'out\\xff', which is no text in utf-8"),
    ("generate {kit}/model {undecodable}", MEND, "argument 3 is .* no text in utf-8"),
    # models
    ("diagnose nobody/nothing", MEND, "there is no folder 'nobody/nothing', and the Hugging Face hub"),
    ("diagnose {kit}/nothing", MEND, "does not exist"),
    ("diagnose ./nothing", MEND, "does not exist"),
    ("diagnose {kit}/text.txt", MEND, "is a file, not a model folder"),
    ("diagnose /dev/zero", MEND, "'/dev/zero' is a"),
    ("diagnose {kit}/empty", MEND, "no config.json"),
    ("diagnose {kit}/no_config", MEND, "no config.json"),
    ("diagnose {kit}/no_weights", MEND, "has no weights"),
    ("diagnose {kit}/pickled", MEND, "only pickled weights"),
    ("diagnose {kit}/nan", MEND, "1 weights hold NaN or infinity, the first is model.norm.weight"),
    ("diagnose {kit}/missing", MEND, "missing.*model.norm.weight"),
    ("diagnose {kit}/misshapen", MEND, "model.norm.weight"),
    ("diagnose {kit}/truncated", MEND, "cannot be loaded"),
    ("diagnose {kit}/zeros", MEND, "cannot be loaded"),
    ("diagnose {kit}/no_tokenizer", MEND, "no tokenizer"),
    ("diagnose {kit}/broken_tokenizer", MEND, "tokenizer"),
    ("diagnose {kit}/config_no_json", MEND, "cannot be loaded"),
    ("diagnose {kit}/config_list", MEND, "cannot be loaded"),
    ("diagnose {kit}/config_empty", MEND, "cannot be loaded"),
    ("diagnose {kit}/unknown_type", MEND, "perceptron"),
    ("diagnose {kit}/no_type", MEND, "cannot be loaded"),
    ("diagnose {kit}/bad_size", MEND, "hidden_size"),
    ("diagnose {kit}/unknown_method", MEND, "method 'telepathy' is not known"),
    ("diagnose {kit}/own_method", MEND, "my_methods.best"),
    ("diagnose {kit}/own_method --allow-methods my_methods", MEND, "install it, or name its folder in PYTHONPATH"),
    ("diagnose {kit}/model --allow-methods ../my_methods", MEND, "'../my_methods' is not the name of a module"),
    ("diagnose {kit}/wrong_option", MEND, "has no option 'groop'; did you mean 'group'"),
    ("diagnose {kit}/vit", MEND, "no language model"),
    ("diagnose {kit}/albert", MEND, "one layer's weights"),
    ("diagnose {kit}/t5", MEND, "encoder-decoder"),
    ("diagnose {kit}/bloom", MEND, "computes its attention itself"),
    ("diagnose {kit}/small_vocabulary", MEND, "the vocabulary has 64"),
    ("diagnose {kit}/model --length 65", MEND, "length 65 is above the model's 64 positions"),
    # text
    ("diagnose {kit}/model --text missing.txt", MEND, "'missing.txt' does not exist"),
    ("diagnose {kit}/model --text {kit}/empty", MEND, "is a folder"),
    ("diagnose {kit}/model --text /dev/zero", MEND, "is a device or a pipe"),
    ("diagnose {kit}/model --text {kit}/empty.txt", MEND, "'empty.txt' is empty"),
    ("diagnose {kit}/model --text {kit}/binary.txt", MEND, "'binary.txt' is not UTF-8 text"),
    ("diagnose {kit}/model --text {kit}/text.pdf", MEND, "text files end in .txt, .jsonl or .parquet"),
    ("diagnose {kit}/model --text {kit}/short.txt", MEND, "the text has 8 bytes, and 2 sequences of 16"),
    ("diagnose {kit}/model --length 64 --sequences 60", MEND, "the text has 3600 tokens; 60 sequences of 64 need 3840"),
    ("diagnose {kit}/model --sequences 100000", MEND, "100000 sequences of 16 are 1600000 tokens"),
    ("diagnose {kit}/model --text {kit}/a.jsonl", MEND, "line 1: no text in column 'text'; it has body"),
    ("diagnose {kit}/model --text {kit}/broken.jsonl", MEND, "'broken.jsonl', line 2: not JSON"),
    ("diagnose {kit}/model --text {kit}/digits.jsonl", MEND, "'digits.jsonl', line 1: not JSON"),
    ("diagnose {kit}/model --text {kit}/nulls.jsonl", MEND, "'nulls.jsonl' holds no text"),
    ("diagnose {kit}/model --text {kit}/surrogate.jsonl", MEND, "line 1: column 'text' holds half of a character"),
    ("diagnose {kit}/model --text {kit}/broken.parquet", MEND, "'broken.parquet' is not a parquet file, or is damaged"),
    ("diagnose {kit}/model --text {kit}/page.parquet", MEND, "'page.parquet' is not a parquet file, or is damaged"),
    ("diagnose {kit}/model --text {kit}/table.parquet --column body", MEND, "no column 'body'; it has text, number"),
    ("diagnose {kit}/model --text {kit}/table.parquet --column number", MEND, "column 'number' holds int64, not text"),
    # intervene
    ("intervene {kit}/model", MEND, "there is nothing to do; give an intervention, such as --waiver 255"),
    ("intervene {kit}/model --waiver 0", MEND, "a waiver of position 0 changes nothing"),
    ("intervene {kit}/model --waiver 0,5", MEND, "a waiver of position 0 changes nothing"),
    ("intervene {kit}/model --waiver five", MEND, "waiver: positions.0"),
    ("intervene {kit}/model --waiver ''", MEND, "waiver: positions.0"),
    ("intervene {kit}/model --waiver -3", MEND, "waiver|No such option"),
    ("intervene {kit}/model --waiver 5 --scan 0-99", MEND, "'0-99' is out of range; layers go from 0 to 7"),
    ("intervene {kit}/model --waiver 5 --scan x", MEND, "neither a layer nor a range"),
    ("intervene {kit}/model --waiver 5 --layers 8", MEND, "layer 8 does not exist; layers go from 0 to 7"),
    ("intervene {kit}/model --waiver 5 --layers 3-1", MEND, "'3-1' is out of range"),
    ("intervene {kit}/model --token-swap 5:7 --layers 3", MEND, "--layers does nothing without"),
    ("intervene {kit}/model --waiver 16", MEND, "position 16 is outside of the sequences of 16 tokens"),
    ("intervene {kit}/model --waiver 15", MEND, "position 15 needs two tokens behind it"),
    ("intervene {kit}/model --waiver 5 --probes 3", MEND, "--probes 3 are more than the 2 sequences"),
    ("intervene {kit}/model --waiver 5 --controls -1", MEND, "'--controls'"),
    ("intervene {kit}/model --scale-values 5", MEND, "write positions:factor"),
    ("intervene {kit}/model --scale-values 5:inf", MEND, "factor: Input should be a finite number"),
    ("intervene {kit}/model --ablate 99:5", MEND, "layer 99 does not exist; layers go from 0 to 7"),
    ("intervene {kit}/model --ablate 1:5:one", MEND, "value"),
    ("intervene {kit}/model --position-swap 1:2", MEND, "no learned position table"),
    ("intervene {kit}/gpt2 --position-swap 1:64", MEND, "it has rows 0 to 63"),
    ("intervene {kit}/model --token-swap 5:99999", MEND, "not in the vocabulary of"),
    ("intervene {kit}/model --token-swap 5:many", MEND, "token_swap: token"),
    ("intervene {kit}/model --file missing.json", MEND, "needed is a .json, .yaml or .yml file that exists"),
    ("intervene {kit}/model --file /dev/zero", MEND, "needed is a .json, .yaml or .yml file that exists"),
    *[
        (f"intervene {{kit}}/model --file {{kit}}/{name}", MEND, message)
        for name, message in {
            "empty.json": "'empty.json', line 1: ",
            "broken.json": "'broken.json', line 2: ",
            "broken.yaml": "'broken.yaml', line 3: ",
            "object.yaml": "'object.yaml', line 1: could not determine a constructor",
            "true.json": "waiver: positions.0: true is no number",
            "true.yaml": "ablate: layer: true is no number",
            "half.json": "waiver: positions.0: .*integer",
            "negative.json": "forbid: positions.0: .*greater than or equal to 0",
            "nobody.json": "waiver: positions: .*at least 1",
            "kind.json": r"intervention \['waiver'\] is not known",
            "unknown.json": "intervention 'exorcise' is not known; use one of waiver",
            "extra.json": "waiver: colour: ",
            "number.yaml": "waiver: 7: ",
            "nan.json": "scale_values: factor: Input should be a finite number",
            "word.json": "write a list such as",
            "strings.json": "write a list such as",
            "deep.json": "'deep.json'",
            "latin.json": "'latin.json': 'utf-8' codec",
        }.items()
    ],
    # retrofit
    ("retrofit {kit}/model", MEND, "give --method, or --kv-budget or --kl-budget"),
    ("retrofit {kit}/model --method cla --kv-budget 0.5", MEND, "give --method, or --kv-budget or --kl-budget"),
    ("retrofit {kit}/model --kv-budget 0.5 --kl-budget 1", MEND, "give --method, or --kv-budget or --kl-budget"),
    ("retrofit {kit}/model --method telepathy", MEND, "telepathy"),
    ("retrofit {kit}/model --kv-budget nan", MEND, "budget nan is no budget"),
    ("retrofit {kit}/model --kl-budget -1", MEND, "budget -1.0 is no budget"),
    ("retrofit {kit}/model --kv-budget 0.5 --layers 0-3", MEND, "--layers 0-3 does nothing with these options"),
    ("retrofit {kit}/model --method uniattn --part mlp", MEND, "--part mlp does nothing with these options"),
    ("retrofit {kit}/model --method cla --select greedy", MEND, "--select greedy does nothing with these options"),
    ("retrofit {kit}/model --method uniattn --merge svd", MEND, "--merge svd does nothing with these options"),
    ("retrofit {kit}/model --method cla --count 2", MEND, "--count 2 does nothing with these options"),
    ("retrofit {kit}/model --method cla --groups 2", MEND, "--groups 2 does nothing with these options"),
    ("retrofit {kit}/model --method cla --layers 0-1 --size 3", MEND, "--size 3 does nothing with these options"),
    ("retrofit {kit}/model --method cla --size 1", MEND, "--size"),
    ("retrofit {kit}/model --method cla --merge sum", MEND, "merge is 'sum'"),
    ("retrofit {kit}/model --method cla --target head", MEND, "target is 'head'"),
    ("retrofit {kit}/model --method cla --compensation magic", MEND, "compensation is 'magic'"),
    ("retrofit {kit}/model --method cla --windows 3", MEND, "--windows 3 is too few"),
    ("retrofit {kit}/model --method cla --layers 6-9", MEND, "'6-9' is out of range; layers go from 0 to 7"),
    ("retrofit {kit}/model --method cla --layers 1,2", MEND, "no second layer"),
    ("retrofit {kit}/small_vocabulary --method cla --layers 1-2", MEND, "the vocabulary has 64"),
    ("retrofit {kit}/gpt2 --method cla", MEND, "'gpt2' cannot be converted"),
    ("retrofit {kit}/bert --method cla", MEND, "'bert' cannot be converted"),
    # bench
    ("bench {kit}/model", MEND, "Missing option '--baseline'"),
    ("bench {kit}/model --baseline {kit}/model --context 0", MEND, "--context is '0'; it takes whole numbers"),
    ("bench {kit}/model --baseline {kit}/model --context 8,", MEND, "--context is '8,'; it takes whole numbers"),
    ("bench {kit}/model --baseline {kit}/model --batch x", MEND, "--batch is 'x'; it takes whole numbers"),
    ("bench {kit}/model --baseline {kit}/model --repeats 0", MEND, "'--repeats'"),
    ("bench {kit}/model --baseline {kit}/model --attention flex", MEND, "attention 'flex' is not measured"),
    ("bench {kit}/model --baseline {kit}/model --context 65", MEND, "context 65 is above the 64 positions"),
    ("bench {kit}/bert --baseline {kit}/model", MEND, "is an encoder; bench measures causal"),
    ("bench {kit}/model --baseline {kit}/nothing", MEND, "does not exist"),
    # verify
    ("verify {kit}/nothing", MEND, "does not exist"),
    ("verify {kit}/bert", MEND, "verify needs a causal LM"),
    ("verify {kit}/model --dtypes int3", MEND, "int3"),
    ("verify {kit}/model --dtypes float32,float32", MEND, "name each once"),
    ("verify {kit}/model --device abacus", MEND, "device 'abacus' cannot be used here"),
    # generate
    ("generate {kit}/model", MEND, "Missing argument 'prompt'"),
    ("generate {kit}/model ' '", MEND, "the prompt is empty"),
    ("generate {kit}/model w1 --temperature 1e-300", MEND, "temperature 1e-300 cannot be used"),
    ("generate {kit}/model w1 --temperature nan", MEND, "temperature"),
    ("generate {kit}/model w1 --temperature inf", MEND, "temperature inf cannot be used"),
    ("generate {kit}/model w1 --max-new-tokens 0", MEND, "'--max-new-tokens'"),
    ("generate {kit}/model w1 --max-new-tokens 64", MEND, "above the model's 64 positions"),
    ("generate {kit}/model w1 --chat", MEND, "no chat template"),
    ("generate {kit}/bert w1", MEND, "generate needs a causal LM"),
    ("generate {kit}/small_vocabulary w400", MEND, "not in the model's vocabulary of 64"),
    # methods
    ("methods --layers 1", MEND, "'--layers'.*greater than or equal to 2"),
    ("methods --layers 1000000000000", MEND, "'--layers'.*less than or equal to"),
]  # fmt: skip


@pytest.fixture(scope="module")
def kit(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kit")
    broken.models(folder)
    broken.texts(folder)
    broken.interventions(folder)
    return folder


def type_in(monkeypatch, words):
    """Run the command line in this process; return its exit status."""
    monkeypatch.setattr(sys, "argv", ["crosslayer", *words])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return stop.value.code


@pytest.mark.parametrize(("command", "status", "message"), CASES, ids=lambda value: str(value)[:60])
def test_one_line(monkeypatch, tmp_path, capfd, kit, command, status, message):
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command)
    usual = shlex.split(USUAL[words[0]]) if words and words[0] in USUAL else []
    for option, value in zip(usual[::2], usual[1::2], strict=True):
        words += [] if option in words else [option, value]
    places = {"kit": str(kit), "long": "x" * 250, "undecodable": "out\udcff"}
    before = sorted(kit.rglob("*"))
    assert type_in(monkeypatch, [word.format(**places) for word in words]) == status
    output = capfd.readouterr()
    errors = [line for line in output.err.splitlines() if line.startswith("crosslayer: error: ")]
    assert "Traceback" not in output.err + output.out
    if message:
        import re

        assert len(errors) == 1 and output.err.endswith(f"{errors[0]}\n"), output.err
        assert re.search(message, errors[0]), errors[0]
    assert not list(tmp_path.iterdir()) and sorted(kit.rglob("*")) == before
