"""What a card says of where a model comes from."""

import pytest

from crosslayer.models import load as module
from crosslayer.models.embedded import cache_folder
from crosslayer.models.load import origin
from tests.helpers.tiny import tiny

SMOLLM2 = {"base_model": "HuggingFaceTB/SmolLM2-135M-Instruct", "license": "apache-2.0", "language": "en"}
FOREIGN = (
    "---\nlicense: other\nlicense_name: mine\nlanguage: [en, no]\nbase_model: org/parent\ntags: [chat]\n---\n\n# A\n"
)


def test_embedded_models_are_known():
    assert origin("smollm2") == SMOLLM2
    model = tiny("llama")
    model.name_or_path = str(cache_folder() / "smollm2-0123456789abcdef")  # as `load_model` has it
    assert origin(model) == SMOLLM2


def test_a_folder_says_what_its_card_says(tmp_path):
    assert origin(tmp_path) == {}
    (tmp_path / "README.md").write_text(FOREIGN.replace("[en, no]", "[en, de]"))
    assert origin(tmp_path) == {"license": "other", "license_name": "mine", "language": ["en", "de"]}
    (tmp_path / "README.md").write_text(FOREIGN.replace("chat", "crosslayer"))  # `no` is no word in YAML
    assert origin(tmp_path) == {"license": "other", "license_name": "mine", "base_model": "org/parent"}
    (tmp_path / "README.md").write_bytes(b"\xef\xbb\xbf" + FOREIGN.replace("\n", "\r\n").encode())  # saved on Windows
    assert origin(tmp_path)["license"] == "other"
    for broken in ("---\n[\n---\n", "---\n" + "[" * 5000 + "\n---\n", "no card"):
        (tmp_path / "README.md").write_text(broken)
        assert origin(tmp_path) == {}


def test_a_model_of_the_hub_has_its_name_and_its_card(tmp_path, monkeypatch):
    (tmp_path / "README.md").write_text(FOREIGN)

    def download(name, file, local_files_only):
        asked.append((name, file, local_files_only))
        return str(tmp_path / file)

    asked = []
    monkeypatch.setattr(module, "hf_hub_download", download)
    monkeypatch.setattr(module, "hub_source", lambda name: name)
    assert origin("org/model") == {"base_model": "org/model", "license": "other", "license_name": "mine"}
    assert asked == [("org/model", "README.md", False)]
    monkeypatch.setattr(module, "hub_source", lambda name: "/a/folder/of/the/cache")
    origin("org/model")
    assert asked[-1][2] is True


def test_a_hub_that_is_away_leaves_the_name():
    assert origin("org/nothing") == {"base_model": "org/nothing"}


@pytest.mark.parametrize("name", ["", "gpt", "not a name/at all"])
def test_what_is_no_name_of_the_hub_says_nothing(name):
    model = tiny("llama")
    model.name_or_path = name
    assert origin(model) == {}
