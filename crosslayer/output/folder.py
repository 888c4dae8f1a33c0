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
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from crosslayer._start import interrupts

WRITTEN = {"record.json", "report.html", "figures", "lm_eval"}  # what a folder of results may hold
FULL = {os.strerror(number): number for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)}  # how any library says so
SHARED, SHARED_FILE = "/dev/shm", "</torch_"  # where processes hand tensors over, and how torch names files there
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # what file systems without locks answer

_reserved: dict[Path, contextlib.ExitStack] = {}  # folders that this process holds until `release_targets`


@contextlib.contextmanager
def whole_folder(target: Path, force: bool = False) -> Iterator[Path]:
    """Give a temporary folder that becomes `target` when the block ends, and disappears if it fails or is interrupted.

    Raises:
        ValueError: `target` exists and `force` is not set, it cannot be written, or another process is writing it.
        OSError: the disk is full.

    """
    target = target.expanduser().resolve()
    with contextlib.nullcontext() if target in _reserved else _holding(target):
        _check(target, force)
        with filled(target) as partial:
            yield partial


def check_target(target: Path, force: bool) -> None:
    """Refuse an output folder before any computation, or keep other processes off it until `release_targets`.

    Raises:
        ValueError: as `whole_folder`.

    """
    target = target.expanduser().resolve()
    with contextlib.ExitStack() as stack:
        if target not in _reserved:
            stack.enter_context(_holding(target))
        _check(target, force)
        if target not in _reserved:
            _reserved[target] = stack.pop_all()


def release_targets() -> None:
    """Let go of every folder that `check_target` keeps."""
    while _reserved:
        _reserved.popitem()[1].close()


@contextlib.contextmanager
def exclusive(target: Path, wait: bool = False) -> Iterator[None]:
    """Hold the lock of `target`, and mend what a killed process left; inside, SIGTERM ends the process in order.

    Raises:
        BlockingIOError: another process holds the lock, and `wait` is not set.
        OSError: nothing can be written beside `target`.

    """
    missing = [folder for folder in target.parents if not folder.exists()]
    path = _beside(target, "lock")
    try:
        with _orderly_end(), _locked(path, wait):
            _mend(target)
            yield
    finally:
        with contextlib.suppress(OSError):  # folders that the lock needed go, if they are empty
            for folder in missing:
                folder.rmdir()


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder that a verb fills as it goes on.

    Raises:
        ValueError: another process holds it.
        OSError: the disk is full.

    """
    try:
        with exclusive(folder), _naming(folder):
            yield
    except BlockingIOError:
        raise ValueError(f"the folder {folder.name!r} is being written by another process; name another") from None


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
        interrupts.caught()  # an interrupt that is raised again would end the cleaning up
        shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def _holding(target: Path) -> Iterator[None]:
    """Hold the lock of an output folder; what goes wrong on the way is said of it."""
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


def _check(target: Path, force: bool) -> None:
    """Refuse an output folder that stands in the way."""
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


@contextlib.contextmanager
def _locked(path: Path, wait: bool) -> Iterator[None]:
    """Hold the lock of a file, which exists only as long as its lock; a killed process holds nothing."""
    handle = _open_locked(path, wait)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
        os.close(handle)


def _open_locked(path: Path, wait: bool) -> int:
    """Open and lock a file; its last holder may remove it in between, and then it is opened anew."""
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            _lock(handle, wait)
            if os.path.samestat(os.fstat(handle), path.stat()):
                return handle
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _lock(handle: int, wait: bool) -> None:
    """Lock an open file, or raise BlockingIOError; on a file system that knows no locks this does nothing."""
    if sys.platform == "win32":
        import msvcrt

        try:
            msvcrt.locking(handle, msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
        except PermissionError:
            raise BlockingIOError from None
    else:
        import fcntl

        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise


@contextlib.contextmanager
def _orderly_end() -> Iterator[None]:
    """Turn SIGTERM into SystemExit(143), so that everything on the way out is cleaned up."""
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _listed(folder: Path) -> set[str]:
    """Return what the manifest of a model's folder lists at its top level, and the manifest itself."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        return {"manifest.json", *(name.split("/")[0] for name in manifest["files"])}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return set()


def _is_ours(folder: Path) -> bool:
    """Return whether a folder holds a result of ours and nothing else."""
    names = {entry.name for entry in folder.iterdir()}
    if not names:
        return True
    listed = _listed(folder)
    if not names <= WRITTEN | listed or any(path.suffix != ".svg" for path in (folder / "figures").glob("*")):
        return False
    if "record.json" not in names:
        return names <= listed  # an export has a manifest alone
    try:
        record = json.loads((folder / "record.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(record, dict) and str(record.get("schema", "")).startswith("crosslayer/")
