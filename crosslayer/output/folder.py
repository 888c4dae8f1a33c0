"""Folders that are written completely or not at all, by a single process at a time.

While a folder `out` is written, there are three entries next to it: `.out.crosslayer-lock`, which its writer holds,
`.out.crosslayer-partial`, the incomplete folder, and, for a moment, `.out.crosslayer-old`, the folder to be replaced.
Nobody touches these without the lock. So a process that takes the lock and finds them knows that another was killed,
and repairs this first: it removes the incomplete folder, and restores the old one if there is no new one.
"""

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

WRITTEN = {"record.json", "report.html", "figures", "lm_eval", "codec.safetensors"}  # files and folders of a result
# The messages of a full disk. All libraries pass these on, but safetensors, tokenizers and torch raise types of their
# own, without the number.
FULL = {os.strerror(number): number for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)}
SHARED, SHARED_FILE = "/dev/shm", "</torch_"  # where processes share tensors, and torch's file names there
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # errors of file systems without locks

_reserved: dict[Path, contextlib.ExitStack] = {}  # folders that this process has locked until `release_targets`


@contextlib.contextmanager
def whole_folder(target: Path, force: bool = False) -> Iterator[Path]:
    """Give a temporary folder that becomes `target` when the block ends, and is removed if the block fails."""
    target = target.expanduser().resolve()
    with contextlib.nullcontext() if target in _reserved else _folder_lock(target):
        check_free(target, force)
        with staged_folder(target) as partial:
            yield partial


def check_target(target: Path, force: bool) -> None:
    """Check an output folder before any computation, and lock it until `release_targets`."""
    target = target.expanduser().resolve()
    with contextlib.ExitStack() as stack:
        if target not in _reserved:
            stack.enter_context(_folder_lock(target))
        check_free(target, force)
        if target not in _reserved:
            _reserved[target] = stack.pop_all()


def release_targets() -> None:
    """Release the locks of `check_target`."""
    while _reserved:
        _reserved.popitem()[1].close()


@contextlib.contextmanager
def exclusive(target: Path, wait: bool = False) -> Iterator[None]:
    """Hold the lock of `target`, and repair what a killed process left; without a lock if the file system has none."""
    missing = [folder for folder in target.parents if not folder.exists()]
    path = _sibling(target, "lock")
    # filelock would fall back to a file whose mere existence locks: it stays when its process is killed
    lock = FileLock(path, blocking=wait, fallback_to_soft=False)
    try:
        _acquire(lock, path.parent)
        try:
            # for the message of another process
            with contextlib.suppress(OSError):
                path.write_text(str(os.getpid()))

            # what a process left that was killed while it wrote: first the old folder, which may be the only whole one
            old = _sibling(target, "old")
            if old.exists() and not target.exists():
                old.rename(target)
            shutil.rmtree(old, ignore_errors=True)
            shutil.rmtree(_sibling(target, "partial"), ignore_errors=True)
            yield
        finally:
            # while it is held: afterwards it may be the file of the next holder
            with contextlib.suppress(OSError):
                path.unlink()
            lock.release()
    finally:
        # the folders that were made for the lock, from the inside out; the first that is not empty ends this
        with contextlib.suppress(OSError):
            for folder in missing:
                folder.rmdir()


def _acquire(lock: FileLock, parent: Path) -> None:
    """Take a lock whose folder another process may remove at any moment."""
    while not lock.is_locked:
        parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire()
        # the previous holder of the lock has removed its folder
        except FileNotFoundError:
            continue
        except Timeout:
            # where no file can be made, filelock reports a timeout too; this open raises the reason
            with open(lock.lock_file, "a"):
                pass
            raise BlockingIOError from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            return


@contextlib.contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder that a verb fills step by step; errors as in `whole_folder`."""
    with _folder_lock(folder), _naming_disk_errors(folder):
        yield


def disk_error(error: Exception) -> str | None:
    """Return the message of a full disk if that is what an error means, else None; libraries raise many types."""
    # torch's words where a write was cut short: they do not say why
    if "inline_container" in str(error) and "unexpected pos" in str(error):
        return "a file could not be written completely; the disk may be full"
    return next((message for message in FULL if message in str(error)), None)


def write_whole(path: Path, text: str) -> None:
    """Write a text file under a temporary name, then rename it."""
    partial = path.with_name(f".{path.name}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def set_modes(folder: Path) -> None:
    """Give all files of a folder the mode that the umask gave the folder; safetensors always writes 0600."""
    mode = folder.stat().st_mode & 0o666
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink() and path.stat().st_mode & 0o666 != mode:
            path.chmod(mode)


@contextlib.contextmanager
def staged_folder(target: Path) -> Iterator[Path]:
    """Give a temporary folder that replaces `target` when the block ends; the caller holds `exclusive`."""
    partial, old = _sibling(target, "partial"), _sibling(target, "old")
    try:
        with _naming_disk_errors(target):
            partial.mkdir()
            yield partial
            set_modes(partial)
        try:
            # a folder that is not empty cannot be replaced by a rename alone, so the old one is put aside first
            if target.exists():
                target.rename(old)
            partial.rename(target)
        # also Ctrl-C between both renames
        except BaseException:
            if old.exists() and not target.exists():
                old.rename(target)
            raise
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def _folder_lock(target: Path) -> Iterator[None]:
    """Hold the lock of an output folder; if that fails, a ValueError names the folder and the reason."""
    with contextlib.ExitStack() as stack:
        try:
            # a name of other bytes could not be written into a record
            target.name.encode()
            stack.enter_context(exclusive(target))
        except BlockingIOError:
            holder = ""
            # the lock may not say yet which process holds it
            with contextlib.suppress(OSError, ValueError):
                holder = f" (process {int(_sibling(target, 'lock').read_bytes()[:10])})"
            raise ValueError(
                f"the folder {target.name!r} is being written by another process{holder}; name another folder"
            ) from None
        except UnicodeEncodeError:
            raise ValueError(f"the name of the folder must be valid UTF-8, got {target.name!a}") from None
        except OSError as error:
            raise ValueError(f"the folder {target.name!r} cannot be written: {error.strerror or error}") from None
        # behind the `except`s, which are for the lock and not for errors of the block
        yield


@contextlib.contextmanager
def _naming_disk_errors(folder: Path) -> Iterator[None]:
    """Name the folder in the error of a full disk, since libraries do not, and raise one type of error for it."""
    try:
        yield
    except Exception as error:
        message = disk_error(error)
        is_named = isinstance(error, OSError) and error.filename is not None
        # what names a file, or is already a sentence of ours, is clear as it is
        if message is None or is_named or isinstance(error, ValueError) or error.__cause__ is not None:
            raise
        path = SHARED if SHARED_FILE in str(error) else str(folder)
        raise OSError(FULL.get(message, errno.ENOSPC), message, path) from error


def check_free(target: Path, force: bool) -> None:
    """Refuse an output folder that exists; with `force`, only one that holds more than crosslayer wrote."""
    target = target.expanduser().resolve()
    if not target.exists():
        return
    if not target.is_dir():
        raise ValueError(f"{target.name!r} is a file; give another name for the folder")
    if not force:
        raise ValueError(f"the folder {target.name!r} exists; give another name, or `force` to replace it")

    # it is ours where it holds only files of a result, or files that the manifest of a model lists
    names = {entry.name for entry in target.iterdir()}
    files = _json_object(target / "manifest.json").get("files")
    listed = {"manifest.json", *(name.split("/")[0] for name in files)} if isinstance(files, dict) else set()
    is_ours = names <= WRITTEN | listed
    # a user may keep figures of another origin there
    is_ours = is_ours and all(path.suffix == ".svg" for path in (target / "figures").glob("*"))
    if is_ours and "record.json" in names:
        is_ours = str(_json_object(target / "record.json").get("schema", "")).startswith("crosslayer/")
    elif is_ours:
        # empty, or an export, which has a manifest only
        is_ours = names <= listed
    if not is_ours:
        raise ValueError(f"the folder {target.name!r} has files not written by crosslayer; `force` does not replace it")


def free_name(folder: str) -> str:
    """Return the name of a folder that does not exist: this one, or with the lowest number: diagnosis-2."""
    name, number = folder, 1
    while Path(name).exists():
        number += 1
        name = f"{folder}-{number}"
    return name


def _sibling(target: Path, what: str) -> Path:
    if not target.name:
        raise ValueError(f"{str(target)!r} cannot be an output folder; name a folder inside it")
    return target.with_name(f".{target.name}.crosslayer-{what}")


def _json_object(path: Path) -> dict[str, Any]:
    """Return the object in an untrusted JSON file; an empty one if there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
