"""Wrong command lines: each ends with exit status 2 and one line, and leaves no files."""

import re
import shlex
import sys

import pytest

from crosslayer import cli
from tests.helpers import broken

# Options that are appended unless the command has them, so that every case is quick.
USUAL = {
    "diagnose": "--text {kit}/text.txt --sequences 2 --length 16 --out out",
    "intervene": "--text {kit}/text.txt --sequences 2 --length 16 --out out",
    "retrofit": "--text {kit}/text.txt --windows 32 --length 16 --calibration 16 --out out",
    "bench": "--contexts 8 --new-tokens 2 --repeats 1 --out out",
    "verify": "--out out",
    "needles": "--out out",
    "generate": "",
    "export": "--out out",
    "methods": "",
    "plan": "",
}
USER_ERROR = 2  # the exit status of every case
CASES = [
    # options of all verbs
    ("diagnoze x", "No such command 'diagnoze'"),
    ("--colour", "No such option: --colour"),
    ("diagnose", "Missing argument 'model'"),
    ("diagnose {kit}/model --colour red", "No such option: --colour"),
    ("diagnose {kit}/model extra", "unexpected extra argument"),
    ("verify {kit}/model --out out --dtypes", "requires an argument"),
    ("diagnose {kit}/model --length ten", "--length must be a valid integer, got ten"),
    ("diagnose {kit}/model --length 1", "--length must be at least 2 and below 2⁶³, got 1"),
    ("diagnose {kit}/model --sequences 0", "--sequences must be at least 1"),
    ("diagnose {kit}/model --sequences 1e3", "--sequences must be a valid integer, got 1e3"),
    ("diagnose {kit}/model --seed 100000000000000000000000", "--seed must be .*below 2⁶³"),
    ("diagnose {kit}/model --seed -1", "--seed must be at least 0 .*got -1"),
    ("diagnose {kit}/model --text {kit}/text.txt,config=en", "--text text.txt: config=en applies only to Hub datasets"),
    ("intervene {kit}/model --waiver 3 --text {kit}/text.txt,split=test", "split=test applies only to Hub"),
    ("retrofit {kit}/model --method cla --text {kit}/text.txt,column=body", "column=body applies only to tables"),
    ("diagnose {kit}/model --bos maybe", "--bos must be auto, yes or no, got"),
    ("diagnose {kit}/model --bos yes", "--bos yes needs a beginning-of-sequence token"),
    ("diagnose {kit}/model --dtype int3", "--dtype must be one of float32, .*got 'int3'"),
    ("diagnose {kit}/model --device abacus", "device 'abacus' cannot be used here"),
    ("diagnose {kit}/model --device meta", "device 'meta' cannot be used here"),
    ("diagnose {kit}/model --device cpu:9:9", "device 'cpu:9:9' cannot be used here"),
    ("diagnose {kit}/model --out {kit}/text.txt", "is a file; give another name"),
    ("diagnose {kit}/model --out {kit}/model", "exists; give another name, or --force"),
    ("diagnose {kit}/model --out {kit}/model --force", "has files not written by crosslayer"),
    ("diagnose {kit}/model --out /proc/nothing/here", "cannot be written"),
    ("diagnose {kit}/model --out /dev/null", "is a file; give another name"),
    ("diagnose {kit}/model --out /", "'/' cannot be an output folder; name a folder inside it"),
    ("diagnose {kit}/model --out {long}", "File name too long"),
    ("diagnose {kit}/model --out {undecodable}", r"argument 4 must be valid utf-8, got b'out\\xff'"),
    ("generate {kit}/model {undecodable}", "argument 3 must be valid utf-8"),
    # models
    ("diagnose nobody/nothing", "there is no folder 'nobody/nothing', and the Hugging Face hub"),
    ("diagnose {kit}/nothing", "does not exist"),
    ("diagnose ./nothing", "does not exist"),
    ("diagnose {kit}/text.txt", "is a file, not a model folder"),
    ("diagnose /dev/zero", "'/dev/zero' is a file, not a model folder"),
    ("diagnose {kit}/empty", "empty' is not a model folder: it has no config.json"),
    ("diagnose {kit}/no_config", "no config.json"),
    ("diagnose {kit}/no_weights", "has no weights"),
    ("diagnose {kit}/pickled", "only pickled weights"),
    ("diagnose {kit}/nan", "1 with NaN or infinity, such as model.norm.weight"),
    ("diagnose {kit}/missing", "missing.*model.norm.weight"),
    ("diagnose {kit}/misshapen", "model.norm.weight.* are missing or misshapen"),
    ("diagnose {kit}/truncated", "incomplete metadata, file not fully covered"),
    ("diagnose {kit}/zeros", "invalid JSON in header"),
    ("diagnose {kit}/no_tokenizer", "it has no readable tokenizer"),
    ("diagnose {kit}/broken_tokenizer", "it has no readable tokenizer"),
    ("diagnose {kit}/config_no_json", "is not a valid JSON file"),
    ("diagnose {kit}/config_list", "cannot be loaded: Unrecognized model"),
    ("diagnose {kit}/config_empty", "is not a valid JSON file"),
    ("diagnose {kit}/unknown_type", "model type `perceptron` but Transformers does not recognize"),
    ("diagnose {kit}/no_type", "cannot be loaded: Unrecognized model"),
    ("diagnose {kit}/bad_size", "Field 'hidden_size' expected int, got str"),
    ("diagnose {kit}/unknown_method", "method 'telepathy' is not known"),
    ("diagnose {kit}/own_method", "method 'my_methods.best' is not known"),
    ("diagnose {kit}/own_method --allow-methods my_methods", "install it, or name its folder in PYTHONPATH"),
    ("diagnose {kit}/model --allow-methods ../my_methods", "'../my_methods' is not a module name"),
    ("diagnose {kit}/wrong_option", "has no option 'groop'; did you mean 'group'"),
    ("diagnose {kit}/vit", "not a language model"),
    ("diagnose {kit}/albert", "one layer's weights"),
    ("diagnose {kit}/t5", "encoder-decoder"),
    ("diagnose {kit}/bloom", "computes its attention itself"),
    ("diagnose {kit}/small_vocabulary", "token ids must be below 64"),
    ("diagnose {kit}/model --length 65", "length 65 is above the model's 64 positions"),
    ("plan {kit}/nothing", "does not exist"),
    ("plan {kit}/no_config", "no config.json"),
    ("plan {kit}/config_no_json", "is not valid JSON"),
    ("plan {kit}/unknown_method", "method 'telepathy' is not known"),
    ("plan {kit}/vit", "has no vocab_size, so it does not describe a language model"),
    ("plan {kit}/t5", "is an encoder-decoder"),
    ("plan {kit}/model --length 0", "--length must be at least 1 token, got 0"),
    ("plan {kit}/model --dtype int3", "--dtype must be one of float32, .*got 'int3'"),
    # text
    ("diagnose {kit}/model --text missing.txt", "'missing.txt' does not exist"),
    ("diagnose {kit}/model --text {kit}/empty", "has no text files"),
    ("diagnose {kit}/model --text /dev/zero", "is a device or a pipe"),
    ("diagnose {kit}/model --text {kit}/empty.txt", "'empty.txt' holds no text"),
    ("diagnose {kit}/model --text {kit}/binary.txt", "'binary.txt' is not UTF-8 text"),
    ("diagnose {kit}/model --text {kit}/text.pdf", "text files end in .txt, .md, .jsonl or .parquet"),
    ("diagnose {kit}/model --text {kit}/short.txt", "the text has 8 bytes, and 2 sequences of 16"),
    ("diagnose {kit}/model --length 64 --sequences 60", "the text has 3600 tokens; 60 sequences of 64 need 3840"),
    ("diagnose {kit}/model --sequences 100000", "100000 sequences of 16 are 1600000 tokens"),
    ("diagnose {kit}/model --text {kit}/a.jsonl", "line 1: no text in column 'text', got body"),
    ("diagnose {kit}/model --text {kit}/broken.jsonl", "'broken.jsonl', line 2: not JSON"),
    ("diagnose {kit}/model --text {kit}/digits.jsonl", "'digits.jsonl', line 1: not JSON"),
    ("diagnose {kit}/model --text {kit}/nulls.jsonl", "'nulls.jsonl' holds no text"),
    ("diagnose {kit}/model --text {kit}/surrogate.jsonl", "line 1: column 'text' holds half of a character"),
    ("diagnose {kit}/model --text {kit}/broken.parquet", "'broken.parquet' is not a parquet file, or is damaged"),
    ("diagnose {kit}/model --text {kit}/page.parquet", "'page.parquet' is not a parquet file, or is damaged"),
    ("diagnose {kit}/model --text {kit}/table.parquet,column=body", "no column 'body'; it has text, number"),
    ("diagnose {kit}/model --text {kit}/table.parquet,column=number", "column 'number'; it holds a value of type int"),
    # intervene
    ("intervene {kit}/model", "at least one, such as --waiver 255"),
    ("intervene {kit}/model --waiver 0", "a waiver of position 0 changes nothing"),
    ("intervene {kit}/model --waiver 0,5", "a waiver of position 0 changes nothing"),
    ("intervene {kit}/model --waiver five", "waiver: positions.0 must be a valid integer"),
    ("intervene {kit}/model --waiver ''", "waiver: positions.0 must be a valid integer"),
    ("intervene {kit}/model --waiver -3", r"waiver: positions\.0 must be greater than or equal to 0"),
    ("intervene {kit}/model --waiver 5 --scan 0-99", "'0-99' is out of range; layers go from 0 to 7"),
    ("intervene {kit}/model --waiver 5 --scan x", "neither a layer nor a range"),
    ("intervene {kit}/model --waiver 5 --layers 8", "layer 8 does not exist: the model has layers 0 to 7"),
    ("intervene {kit}/model --waiver 5 --layers 3-1", "'3-1' is out of range"),
    ("intervene {kit}/model --token-swap 5:7 --layers 3", "--layers needs --waiver"),
    ("intervene {kit}/model --waiver 16", "position 16 is outside the sequences, which have 16 tokens"),
    ("intervene {kit}/model --waiver 15", "position 15 needs two tokens after it"),
    ("intervene {kit}/model --waiver 5 --controls -1", "--controls must be greater than or equal to 0, got -1"),
    ("intervene {kit}/model --scale-values 5", "--scale-values must be POSITIONS:FACTOR"),
    ("intervene {kit}/model --scale-values 5:inf", "scale_values: factor must be a finite number"),
    ("intervene {kit}/model --ablate 99:5", "layer 99 does not exist: the model has layers 0 to 7"),
    ("intervene {kit}/model --ablate 1:5:one", "ablate: value must be 'zero' or 'mean'"),
    ("intervene {kit}/model --position-swap 1:2", "needs a learned position table"),
    ("intervene {kit}/gpt2 --position-swap 1:64", "rows 0 to 63"),
    ("intervene {kit}/model --token-swap 5:99999", "not in the vocabulary of"),
    ("intervene {kit}/model --token-swap 5:many", r"token: must be an id"),
    # retrofit
    ("retrofit {kit}/model", "give one of --method, --kv-budget, --kl-budget and --read-budget"),
    ("retrofit {kit}/model --method svformer", "--method must be one of cla, drop"),
    ("retrofit {kit}/model --method cla --kv-budget 0.5", "remove it, or --method cla"),
    ("retrofit {kit}/model --kv-budget 0.5 --kl-budget 1", "give one of --method, --kv-budget, --kl-budget"),
    ("retrofit {kit}/model --method telepathy", "method 'telepathy' is not known"),
    ("retrofit {kit}/model --kv-budget nan", "--kv-budget must be a finite number, got nan"),
    ("retrofit {kit}/model --kl-budget -1", r"--kl-budget must be greater than 0, got -1\.0"),
    ("retrofit {kit}/model --kv-budget 0.5 --layers 0-3", "--layers 0-3 has no effect with the other options"),
    ("retrofit {kit}/model --method uniattn --part mlp", "--part mlp has no effect with the other options"),
    ("retrofit {kit}/model --method cla --layers auto:magic", "--layers must be one of .*, got 'auto:magic'"),
    ("retrofit {kit}/model --method cla --count 2", "--count must be a multiple of --size − 1 = 3, got 2"),
    ("retrofit {kit}/model --method cla --compensation lstsq --groups 2", "--groups 2 has no effect"),
    ("retrofit {kit}/model --method cla --layers 0-1 --size 3", "--size 3 has no effect"),
    ("retrofit {kit}/model --method cla --size 1", "size must be greater than or equal to 2"),
    ("retrofit {kit}/model --method cla --target head", "target must be one of .*, got 'head'"),
    ("retrofit {kit}/model --method cla --compensation magic", "compensation must be one of .*, got 'magic'"),
    ("retrofit {kit}/model --method cla --windows 3", "--windows must be at least 16 .16 of each domain., got 3"),
    ("retrofit {kit}/model --method cla --layers 6-9", "'6-9' is out of range; layers go from 0 to 7"),
    ("retrofit {kit}/model --method cla --layers 1,2", "each group must have at least two layers"),
    ("retrofit {kit}/small_vocabulary --method cla --layers 1-2", "token ids must be below 64"),
    ("retrofit {kit}/gpt2 --method cla", "'gpt2' cannot be converted"),
    ("retrofit {kit}/bert --method cla", "'bert' cannot be converted"),
    # bench
    ("bench {kit}/model", "Missing option '--baseline'; see crosslayer bench --help"),
    ("bench {kit}/model --baseline {kit}/model --contexts 0", "--contexts must be greater than 0, got 0"),
    ("bench {kit}/model --baseline {kit}/model --contexts 8,", "--contexts must be whole numbers .*got '8,'"),
    ("bench {kit}/model --baseline {kit}/model --batches x", "--batches must be whole numbers"),
    ("bench {kit}/model --baseline {kit}/model --repeats 0", "--repeats must be greater than 0"),
    ("bench {kit}/model --baseline {kit}/model --attention flex", "--attention must be 'sdpa' or 'eager', got 'flex'"),
    ("bench {kit}/model --baseline {kit}/model --contexts 65", "context 65 .* 64 positions"),
    ("bench {kit}/bert --baseline {kit}/model", "bench needs a causal LM"),
    ("bench {kit}/model --baseline {kit}/nothing", "does not exist"),
    # verify
    ("verify {kit}/nothing", "does not exist"),
    ("verify {kit}/bert", "verify needs a causal LM"),
    ("verify {kit}/model --dtypes int3", "--dtypes must be one or more of float32"),
    ("verify {kit}/model --dtypes float32,float32", "--dtypes must be one or more of .* got float32, float32"),
    ("verify {kit}/model --device abacus", "device 'abacus' cannot be used here"),
    # needles
    ("needles {kit}/model --lengths 64", "--lengths must be at least 256 tokens, got 64"),
    ("needles {kit}/model --lengths 256", "length 256 .* 64 positions"),
    ("needles {kit}/model --lengths ''", "--lengths must be whole numbers separated by commas"),
    ("needles {kit}/model --depths 0,101", "--depths must be 0-100, got 101"),
    ("needles {kit}/model --keys 2000", "--keys must be 1-1600, got 2000"),
    ("needles {kit}/bert", "needles needs a causal LM"),
    ("needles {kit}/model --baseline {kit}/nothing", "does not exist"),
    # generate
    ("generate {kit}/model", "Missing argument 'prompt'"),
    ("generate {kit}/model ' '", "the prompt is empty"),
    ("generate {kit}/model w1 --temperature 1e-300", "--temperature must be 0 .* got 1e-300"),
    ("generate {kit}/model w1 --temperature nan", "--temperature must be 0 .* got nan"),
    ("generate {kit}/model w1 --temperature inf", "--temperature must be 0 .* got inf"),
    ("generate {kit}/model w1 --max-new-tokens 0", "--max-new-tokens must be greater than or equal to 1, got 0"),
    ("generate {kit}/model w1 --max-new-tokens 64", "the model's 64 positions"),
    ("generate {kit}/model w1 --chat", "no chat template"),
    ("generate {kit}/bert w1", "generate needs a causal LM"),
    ("generate {kit}/small_vocabulary w400", "not in the model's vocabulary of 64"),
    # export
    ("export {kit}/model", "Missing option '--to'"),
    ("export {kit}/model --to onnx", "--to must be one of hf, deci, gguf, got 'onnx'"),
    ("export {kit}/model --to gguf", "the tokenizer is WordLevel; only byte-level BPE can be written"),
    ("export {kit}/model --to hf --dtype int3", "--dtype must be one of float32, .*got 'int3'"),
    ("export {kit}/model --to hf --dtype float64", "--dtype must be float32, bfloat16 or float16, got float64"),
    ("export {kit}/gpt2 --to deci", "'gpt2' cannot be converted.*llama, "),
    ("export {kit}/bert --to hf", "export needs a causal LM"),
    ("export {kit}/nothing --to hf", "does not exist"),
    # methods
    ("methods --layers 1", "--layers must be 2 to 10,000, got 1"),
    ("methods --layers 1000000000000", "--layers must be 2 to 10,000, got "),
]  # fmt: skip


@pytest.fixture(scope="module")
def kit(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kit")
    broken.models(folder)
    broken.texts(folder)
    return folder


def type_in(monkeypatch, words):
    """Run the command line in this process; return its exit status."""
    monkeypatch.setattr(sys, "argv", ["crosslayer", *words])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return stop.value.code


@pytest.mark.parametrize(("command", "message"), CASES, ids=lambda value: str(value)[:60])
def test_it_ends_with_one_line(monkeypatch, tmp_path, capfd, kit, command, message):
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command)
    usual = shlex.split(USUAL[words[0]]) if words and words[0] in USUAL else []
    for option, value in zip(usual[::2], usual[1::2], strict=True):
        words += [] if option in words else [option, value]
    values = {"kit": str(kit), "long": "x" * 250, "undecodable": "out\udcff"}
    before = sorted(kit.rglob("*"))
    assert type_in(monkeypatch, [word.format(**values) for word in words]) == USER_ERROR
    output = capfd.readouterr()
    errors = [line for line in output.err.splitlines() if line.startswith("crosslayer: error: ")]
    assert "Traceback" not in output.err + output.out
    if message:
        assert len(errors) == 1 and output.err.endswith(f"{errors[0]}\n"), output.err
        assert re.search(message, errors[0]), errors[0]
    assert not list(tmp_path.iterdir()) and sorted(kit.rglob("*")) == before
