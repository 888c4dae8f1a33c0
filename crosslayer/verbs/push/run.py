"""Upload a model's folder to the Hugging Face hub, in a single commit."""

from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

from crosslayer.hub import is_hub_name
from crosslayer.output.manifest import read_manifest
from crosslayer.output.progress import Meter, Silent
from crosslayer.verbs.push.result import Pushed
from crosslayer.verbs.push.texts import CARD, RESULTS, own_texts

# what its HTTP library raises; which library that is depends on its version
UNREACHABLE: type[Exception] = HfHubHTTPError.__bases__[0]  # type: ignore[assignment]
SHOWN = 200  # characters of what a server says


def push(
    source: str | Path, repo: str, *, private: bool = False, dry_run: bool = False, progress: Meter = Silent
) -> Pushed:
    """Upload a model's folder with its card, report and manifest to the Hugging Face hub.

    The card gets the repository's name, and the manifest goes up with the digest of that card. The token is the one of
    `hf auth login`, or HF_TOKEN; HF_ENDPOINT names another server.

    Args:
        source: the folder of a retrofit, of a healed model or of an export.
        repo: NAME or OWNER/NAME on the Hugging Face hub; made where it is not there.
        private: make the repository private; one that exists must be private already.
        dry_run: print the card; upload nothing and ask nobody.
        progress: in Python, shows what is being done.

    Raises:
        ValueError: the folder is no model's folder of ours or is not as it was written, `repo` is no name, there is no
            token, or the server refuses or cannot be reached.

    """
    folder = Path(source).expanduser()
    if not is_hub_name(repo):
        raise ValueError(
            f"{repo!r} is no name of a repository: it is NAME or OWNER/NAME, of letters, digits, -, _ and ."
        )
    texts = own_texts(folder, repo)
    listed = [name for name in read_manifest(folder).files if name not in texts]
    sizes = {name: (folder / name).stat().st_size for name in listed}
    sizes |= {name: len(text.encode()) for name, text in texts.items()}
    url = None
    if not dry_run:
        operations = [CommitOperationAdd(name, folder / name) for name in listed]
        operations += [CommitOperationAdd(name, text.encode()) for name, text in texts.items()]
        with progress(f"uploading {sum(sizes.values()):,} bytes", 0):
            repo, url = _upload(repo, operations, private)
    return Pushed(repo=repo, url=url, files=sizes, card=texts[CARD], eval_results=texts.get(RESULTS))


def _upload(repo: str, operations: list[CommitOperationAdd], private: bool) -> tuple[str, str]:
    """Return the repository's full name, and its address."""
    token = get_token()
    if token is None:
        raise ValueError("there is no token for the Hugging Face hub; run `hf auth login`, or set HF_TOKEN")
    api = HfApi(token=token)
    try:
        made = api.create_repo(repo, private=private or None, exist_ok=True)
        if private and not api.model_info(made.repo_id).private:
            raise ValueError(f"{made.repo_id!r} exists and is public; make it private first, or leave --private out")
        api.create_commit(made.repo_id, operations, commit_message="Upload by crosslayer push")
    except HfHubHTTPError as error:
        words = " ".join((error.server_message or "").split()) or str(error.response.reason_phrase)
        answer = f"{error.response.status_code}, {words.rstrip(' .')[:SHOWN]}"
        raise ValueError(f"the Hugging Face hub refused {repo!r}: {answer}") from error
    except (UNREACHABLE, OfflineModeIsEnabled) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"the Hugging Face hub cannot be reached: {reason[:SHOWN]}") from error
    return made.repo_id, str(made)
