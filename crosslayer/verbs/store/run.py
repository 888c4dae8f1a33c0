"""Lists, checks and prunes a store of prompts."""

from crosslayer.codec.format import OtherFormat, check_hash, read_header
from crosslayer.codec.store import Files, prune
from crosslayer.output.progress import progress
from crosslayer.verbs.store.result import Stored
from crosslayer.wiring.engines import parse_bytes


def store(url: str, *, verify: bool = True, limit: str | None = None, remove_damaged: bool = False) -> Stored:
    """List a store of prompts, check every block, and remove the least recently used blocks.

    Args:
        url: a folder, or any fsspec URL.
        verify: read every block and check its SHA-256.
        limit: remove the least recently used blocks until the store has at most this size, such as 20GiB.
        remove_damaged: remove blocks that are truncated or altered.

    Raises:
        ValueError: the URL or the limit cannot be read, or there is no store.
    """
    files = Files(url)
    most = None if limit is None else parse_bytes(limit, "`limit`")
    if not files.system.exists(files.folder):
        raise ValueError(f"the store {url!r} does not exist; a PromptStore makes it when it saves a prompt")
    before = sum(entry.size for entry in files.entries())
    left = before if most is None else prune(files, most)
    entries, damaged, prompts, tokens, unread = files.entries(), [], 0, 0, 0
    with progress("checking blocks", len(entries)) as bar:
        for done, entry in enumerate(entries, 1):
            try:
                data = files.read(entry.path, None if verify else 2**16)
                block = read_header(data)
                if verify:
                    check_hash(data)
            except (OSError, OtherFormat):  # removed meanwhile, out of reach, or of another release: not damaged
                unread += 1
            except ValueError:
                damaged.append(entry.path)
                if remove_damaged:
                    files.remove(entry.path)
            else:
                prompts += block.start == 0
                tokens += len(block.tokens)
            bar.step(done, len(entries))
    last = max((entry.used for entry in entries), default=None)
    return Stored(
        str(url), len(entries), prompts, tokens, left, before - left, len(damaged), remove_damaged, unread, last
    )
