"""Upload a model folder to the Hugging Face hub in a single commit."""

from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

from crosslayer.hub import is_hub_name
from crosslayer.output.manifest import read_manifest
from crosslayer.output.progress import progress
from crosslayer.verbs.push.result import Pushed
from crosslayer.verbs.push.texts import CARD, RESULTS, own_texts

# the base error of the HTTP library, which depends on the version of huggingface_hub
UNREACHABLE: type[Exception] = HfHubHTTPError.__bases__[0]  # type: ignore[assignment]
SHOWN = 200  # characters shown of a server's message


def push(source: str | Path, repo: str, *, private: bool = False, dry_run: bool = False) -> Pushed:
    """Upload a model folder with its card, report and manifest to the Hugging Face hub.

    The repository's name is filled into the card, and the uploaded manifest has that card's hash. The token comes
    from `hf auth login` or HF_TOKEN; HF_ENDPOINT selects another server.

    Args:
        source: the folder of a retrofit, of a healed model or of an export.
        repo: NAME or OWNER/NAME on the Hugging Face hub; created if it does not exist.
        private: create a private repository; an existing one must already be private.
        dry_run: print the card without uploading or contacting the hub.

    Raises:
        ValueError: the folder was not written by crosslayer or was changed since, `repo` is not a valid name, there is
            no token, or the server rejects the upload or cannot be reached.
    """
    folder = Path(source).expanduser()
    if not is_hub_name(repo):
        raise ValueError(f"REPO must be NAME or OWNER/NAME, of letters, digits, -, _ and ., got {repo!r}")
    texts = own_texts(folder, repo)
    names = [name for name in read_manifest(folder).files if name not in texts]
    sizes = {name: (folder / name).stat().st_size for name in names}
    sizes |= {name: len(text.encode()) for name, text in texts.items()}
    url = None
    if not dry_run:
        operations = [CommitOperationAdd(name, folder / name) for name in names]
        operations += [CommitOperationAdd(name, text.encode()) for name, text in texts.items()]
        with progress(f"uploading {sum(sizes.values()):,} bytes", 0):
            repo, url = _upload(repo, operations, private)
    return Pushed(repo=repo, url=url, files=sizes, card=texts[CARD], eval_results=texts.get(RESULTS))


def _upload(repo: str, operations: list[CommitOperationAdd], private: bool) -> tuple[str, str]:
    """Create the repository if needed and commit; return its full name and its address."""
    token = get_token()
    if token is None:
        raise ValueError("push needs a token for the Hugging Face hub: run `hf auth login`, or set HF_TOKEN")
    api = HfApi(token=token)
    try:
        created = api.create_repo(repo, private=private or None, exist_ok=True)
        if private and not api.model_info(created.repo_id).private:
            raise ValueError(f"{created.repo_id!r} exists and is public; make it private first, or omit --private")
        api.create_commit(created.repo_id, operations, commit_message="Upload by crosslayer push")
    except HfHubHTTPError as error:
        message = " ".join((error.server_message or "").split()) or str(error.response.reason_phrase)
        answer = f"{error.response.status_code}, {message.rstrip(' .')[:SHOWN]}"
        raise ValueError(f"the Hugging Face hub rejected {repo!r}: {answer}") from error
    except (UNREACHABLE, OfflineModeIsEnabled) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"the Hugging Face hub cannot be reached: {reason[:SHOWN]}") from error
    return created.repo_id, str(created)
