"""Folders that are written whole or not at all, by a single process at a time.

Beside a folder `out` that is being written lie `.out.crosslayer-lock`, which its writer holds,
`.out.crosslayer-partial`, what is not complete, and, for a moment, `.out.crosslayer-old`, what is replaced. Nobody
touches these without the lock. So whoever takes it knows that what lies there was left by a process that was killed,
and mends it first: the incomplete is removed, and the old folder comes back where nothing stands in its place.
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

WRITTEN = {"record.json", "report.html", "figures", "lm_eval"}  # what a folder of results may hold
FULL = {os.strerror(number): number for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)}  # how any library says so
SHARED, SHARED_FILE = "/dev/shm", "</torch_"  # where processes hand tensors over, and how torch names files there
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # what file systems without locks answer

_reserved: dict[Path, contextlib.ExitStack] = {}  # folders that this process holds until `release_targets`


@contextlib.contextmanager
def whole_folder(target: Path, force: bool = False) -> Iterator[Path]:
    """Give a temporary folder that becomes `target` when the block ends, and disappears if the block fails."""
    target = target.expanduser().resolve()
    with contextlib.nullcontext() if target in _reserved else _lock_of(target):
        check_free(target, force)
        with filled(target) as partial:
            yield partial


def check_target(target: Path, force: bool) -> None:
    """Refuse an output folder before any computation, or keep other processes off it until `release_targets`."""
    target = target.expanduser().resolve()
    with contextlib.ExitStack() as stack:
        if target not in _reserved:
            stack.enter_context(_lock_of(target))
        check_free(target, force)
        if target not in _reserved:
            _reserved[target] = stack.pop_all()


def release_targets() -> None:
    """Let go of every folder that `check_target` keeps."""
    while _reserved:
        _reserved.popitem()[1].close()


@contextlib.contextmanager
def exclusive(target: Path, wait: bool = False) -> Iterator[None]:
    """Hold the lock of `target`, and mend what a killed process left; a file system without locks gives none."""
    missing = [folder for folder in target.parents if not folder.exists()]
    path = _beside(target, "lock")
    lock = FileLock(path, blocking=wait, fallback_to_soft=False)
    try:
        _acquire(lock, path.parent)
        try:
            _mend(target)
            yield
        finally:
            with contextlib.suppress(OSError):
                path.unlink()
            lock.release()
    finally:
        with contextlib.suppress(OSError):  # folders that the lock needed go, if they are empty
            for folder in missing:
                folder.rmdir()


def _acquire(lock: FileLock, parent: Path) -> None:
    while not lock.is_locked:
        parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire()
        except FileNotFoundError:  # who held the lock before has removed its folder since
            continue
        except Timeout:
            raise BlockingIOError from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            return


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder that a verb fills as it goes on; errors as `whole_folder`."""
    with _lock_of(folder), _naming(folder):
        yield


def disk_fault(error: Exception) -> str | None:
    """Return in words that a disk took no more, where that is what an error means; libraries have many for it."""
    if "inline_container" in str(error) and "unexpected pos" in str(error):  # torch does not pass on why
        return "a file could not be written to its end; its disk may be full"
    return next((words for words in FULL if words in str(error)), None)


def write_whole(path: Path, text: str) -> None:
    """Write a text file beside its place, and put it there."""
    partial = path.with_name(f".{path.name}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def set_modes(folder: Path) -> None:
    """Give every file of a folder the mode that the umask gave the folder; safetensors writes 0600 whatever it is."""
    mode = folder.stat().st_mode & 0o666
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink() and path.stat().st_mode & 0o666 != mode:
            path.chmod(mode)


@contextlib.contextmanager
def filled(target: Path) -> Iterator[Path]:
    """Give a temporary folder that takes the place of `target` when the block ends; the caller holds `exclusive`."""
    partial, old = _beside(target, "partial"), _beside(target, "old")
    try:
        with _naming(target):
            partial.mkdir()
            yield partial
            set_modes(partial)
        try:
            if target.exists():
                target.rename(old)
            partial.rename(target)
        except BaseException:
            if old.exists() and not target.exists():
                old.rename(target)
            raise
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def _lock_of(target: Path) -> Iterator[None]:
    """Hold the lock of an output folder; why it cannot be had is a ValueError that names the folder."""
    with contextlib.ExitStack() as stack:
        try:
            target.name.encode()
            stack.enter_context(exclusive(target))
        except BlockingIOError:
            raise ValueError(
                f"the folder {target.name!r} is being written by another process; name another folder"
            ) from None
        except UnicodeEncodeError:
            raise ValueError(f"the folder {target.name!a} is no text in UTF-8; name another folder") from None
        except OSError as error:
            raise ValueError(f"the folder {target.name!r} cannot be written: {error.strerror or error}") from None
        yield


@contextlib.contextmanager
def _naming(folder: Path) -> Iterator[None]:
    """Say which folder could not be written where the disk was full: libraries name none, and raise what they like."""
    try:
        yield
    except Exception as error:
        fault = disk_fault(error)
        named = isinstance(error, OSError) and error.filename is not None
        if fault is None or named or isinstance(error, ValueError) or error.__cause__ is not None:  # said well already
            raise
        path = SHARED if SHARED_FILE in str(error) else str(folder)
        raise OSError(FULL.get(fault, errno.ENOSPC), fault, path) from error


def check_free(target: Path, force: bool) -> None:
    """Refuse an output folder that exists, or with `force` one that holds more than we wrote."""
    target = target.expanduser().resolve()
    if target.exists() and not target.is_dir():
        raise ValueError(f"the folder {target.name!r} is a file; name another")
    if target.exists() and not force:
        raise ValueError(f"the folder {target.name!r} exists; give another name, or `force` to replace it")
    if target.exists() and not _is_ours(target):
        raise ValueError(f"the folder {target.name!r} holds more than crosslayer wrote, so `force` does not replace it")


def _beside(target: Path, what: str) -> Path:
    if not target.name:
        raise ValueError(f"{str(target)!r} cannot be a folder of results; name one inside it")
    return target.with_name(f".{target.name}.crosslayer-{what}")


def _mend(target: Path) -> None:
    """Put right what a process left that was killed while it wrote `target`."""
    old = _beside(target, "old")
    if old.exists() and not target.exists():
        old.rename(target)
    shutil.rmtree(old, ignore_errors=True)
    shutil.rmtree(_beside(target, "partial"), ignore_errors=True)


def _is_ours(folder: Path) -> bool:
    """Return whether a folder holds nothing but a result of ours, or what the manifest of a model lists."""
    names = {entry.name for entry in folder.iterdir()}
    files = _read(folder / "manifest.json").get("files")
    listed = {"manifest.json", *(name.split("/")[0] for name in files)} if isinstance(files, dict) else set()
    if not names <= WRITTEN | listed or any(path.suffix != ".svg" for path in (folder / "figures").glob("*")):
        return False
    if "record.json" not in names:
        return names <= listed  # nothing, or an export, which has a manifest alone
    return str(_read(folder / "record.json").get("schema", "")).startswith("crosslayer/")


def _read(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file that may come from anyone; an empty one where there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
