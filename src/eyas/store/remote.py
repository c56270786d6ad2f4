"""Data in an object store (`s3://bucket/path`, `gs://`, `az://`): fetched once to a local folder, and read from there.

Training reads each byte many times and at random; a local disk does that at its limit, and a bucket does not. So a URL
in place of a folder means: its objects are staged below `--stage-dir`, as the files that they were, and everything else
(index, checksums, read path) is what it is for any folder. An object whose size and etag are those of the staged file
is not fetched again. One that was begun goes on behind the bytes that are there, if its etag is the same. Files are
made under a side name, synced and renamed; the index files of a store come last. A file whose content proves to be
damaged is fetched once more (`fetch_again`).

Cost: one listing each time; fetching runs at what THREADS connections give, 8 MiB a request, without a second copy on
the disk. Memory: THREADS times 8 MiB. `obstore` (and boto3, for ~/.aws) is imported only when a URL is given.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from eyas.errors import EyasError
from eyas.files import size_text, sync_folder, write_json

SCHEMES = ("s3", "s3a", "gs", "az", "abfs", "abfss")
STAGE_DIR = "EYAS_STAGE_DIR"  # in the environment: where URLs are staged, unless `--stage-dir` says it
THREADS = 8  # objects that are fetched at once
PIECE = 8 << 20
SAY_SECONDS = 2.0
KEPT = ".staged.json"  # {file: [size, etag]} of what is whole in the folder
_SIDE = re.compile(r"\..*\.[0-9a-f]{16}\.part")
_URL = re.compile(rf"({'|'.join(SCHEMES)}):/{{1,2}}([^/]+)/?(.*)")  # pathlib makes one slash of two
# What pathlib has made of a URL (one slash) is told from a path such as `exp:/x` by the schemes that there are.
_WEB = ("http", "https", "ftp", "sftp", "ssh", "file", "hdfs", "hf", "gcs", "r2", "oss", "cos", "obs", "wasb", "wasbs")
_ANY_URL = re.compile(rf"([A-Za-z][A-Za-z0-9+.-]+(?=://)|(?:{'|'.join((*SCHEMES, *_WEB))})(?=:/)):/{{1,3}}(.*)")

Say = Callable[[str], None]


class Object(NamedTuple):
    """name: below the URL, with slashes; size in bytes; etag: of its content, or ""."""

    name: str
    size: int
    etag: str


def url_of(path: Path | str) -> str | None:
    """The URL that a path means, without a slash at its end, or None for a path. pathlib may have been at it."""
    found = _URL.fullmatch(os.fspath(path))
    if found is None:
        return None
    scheme, bucket, rest = found.groups()
    return f"{scheme}://{bucket}/{rest}".rstrip("/")


def check_local(path: Path | str) -> None:
    """EyasError for a URL, of any kind, that is to be written: pathlib would quietly make a folder called `s3:`."""
    found = _ANY_URL.fullmatch(os.fspath(path))
    if found is not None:
        url = f"{found[1]}://{found[2]}"
        raise EyasError(f"{url}: eyas reads from object stores and writes to folders: name a folder, and copy it there")


def folder_of(url: str, stage_dir: Path | str | None = None) -> Path:
    """Where a URL is staged: below stage_dir, $EYAS_STAGE_DIR or ~/.cache/eyas/staged, by scheme, bucket and path."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "eyas" / "staged"
    top = Path(stage_dir or os.environ.get(STAGE_DIR) or cache)
    check_local(top)
    scheme, _, rest = url.partition("://")
    if ".." in rest.split("/"):
        raise EyasError(f"{url}: a path with .. in it")
    return top / scheme / rest


def staged(path: Path | str, say: Say | None = None, stage_dir: Path | str | None = None) -> Path:
    """The local folder for `path`: itself, or where a URL's objects are now, all of them and as they are there now.

    Raises EyasError in one line: no such bucket, no credentials, nothing there, no room, gone while it was fetched.
    """
    url = url_of(path)
    if url is None:
        return Path(path)
    say = say or (lambda _line: None)
    folder = folder_of(url, stage_dir)
    bucket = _open(url)
    with _errors(url, folder):
        there = _list(bucket, url)
    with _written(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(folder, say):
            _fetch(bucket, url, there, folder, say)
    _staged[folder] = url
    return folder


_staged: dict[Path, str] = {}  # what this process has staged: folder -> URL
_fetched_again: set[Path] = set()
_again = threading.Lock()


def fetch_again(path: Path | str, say: Say | None = None) -> bool:
    """Fetch a staged file anew, because what it holds is damaged; whether it is another one now. For many threads.

    Once a file and process: later callers, whose bytes may be from before, are told True and find what was fetched.
    False for a file that `staged` did not bring, or whose object has changed. Raises EyasError when fetching fails.
    """
    path = Path(path)
    with _again:
        folder = next((f for f in _staged if path.is_relative_to(f)), None)
        if folder is None or path in _fetched_again:
            return folder is not None
        url, name = _staged[folder], path.relative_to(folder).as_posix()
        bucket = _open(url)
        with _errors(url, folder):
            o = next((o for o in _list(bucket, url) if o.name == name), None)
        with _written(folder), _alone(folder, say or (lambda _line: None)):
            if o is None or _kept(folder).get(name) != [o.size, o.etag]:
                return False
            if say is not None:
                say(f"{path} is damaged: it is fetched once more from {url}")
            with _errors(f"{url}/{name}", folder):
                _fetch_one(bucket, o, folder, lambda _nbytes: None, threading.Event())
        _fetched_again.add(path)
        return True


@contextlib.contextmanager
def _written(folder: Path) -> Iterator[None]:
    """A disk that refuses, as one line."""
    try:
        yield
    except OSError as error:
        raise EyasError(
            f"{folder} cannot be written: {error.strerror}: make room, or name another folder (--stage-dir); what is"
            " fetched stays"
        ) from None


def _open(url: str) -> Any:
    try:
        from obstore.store import from_url
    except ImportError:
        raise EyasError(f"{url}: object stores need obstore: pip install 'eyas[s3]'") from None
    options: dict[str, Any] = {
        "client_options": {"timeout": "60s", "connect_timeout": "10s", "allow_http": True},
        "retry_config": {"max_retries": 4, "retry_timeout": timedelta(seconds=60)},
    }
    if url.startswith("s3"):
        with contextlib.suppress(Exception):  # without boto3, or with nothing in ~/.aws, the environment has to do
            from obstore.auth.boto3 import Boto3CredentialProvider

            options["credential_provider"] = Boto3CredentialProvider()
    with _errors(url, None):
        return from_url(url, **options)


def _list(bucket: Any, url: str) -> list[Object]:
    """Every object below the URL. Raises EyasError where there is none."""
    import obstore

    found = [
        Object(str(meta["path"]), int(meta["size"]), str(meta.get("e_tag") or ""))
        for some in obstore.list(bucket)
        for meta in some
    ]
    # Hidden files are what somebody's machine kept for itself, this one's index among them.
    found = [o for o in found if not o.name.endswith("/") and not Path(o.name).name.startswith(".")]
    found = [o for o in found if ".." not in o.name.split("/")]
    if not found:
        raise EyasError(f"{url} holds nothing: name the folder of a store in that bucket")
    return sorted(found)


@contextlib.contextmanager
def _alone(folder: Path, say: Say) -> Iterator[None]:
    """One process at a time stages into a folder; others wait, and then find what it fetched."""
    with (folder / ".staging.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"{folder} is being staged by another process: waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:  # a file system without locks
            pass
        yield


def _fetch(bucket: Any, url: str, there: list[Object], folder: Path, say: Say) -> None:
    """Make the folder hold exactly these objects, and the files of its own that nobody else has."""
    kept = _kept(folder)
    todo = [o for o in there if not _is_here(folder, o, kept)]
    sides = {_side(folder, o) for o in todo}
    for side in folder.rglob(".*.part"):
        if side not in sides and _SIDE.fullmatch(side.name):  # begun with an earlier content
            side.unlink()
    begun = {o.name: _begun(folder, o) for o in todo}
    missing = sum(o.size - begun[o.name] for o in todo)
    total = sum(o.size for o in there)
    if not todo:
        say(f"{url}: {len(there):,} files, {size_text(total)}, are staged in {folder}")
    else:
        free = shutil.disk_usage(folder).free
        say(
            f"{url}: {size_text(missing)} of {size_text(total)} in {len(todo):,} of {len(there):,} files are fetched to"
            f" {folder}, where {size_text(free)} are free"
        )
        if missing > free:
            raise EyasError(
                f"{folder}: {size_text(missing)} of {url} are to be fetched and {size_text(free)} are free there: make"
                " room, or name another folder (--stage-dir)"
            )
        _fetch_all(bucket, url, todo, folder, kept, missing, say)
    names = {o.name for o in there}
    gone = [name for name in kept if name not in names]
    for name in gone:
        (folder / name).unlink(missing_ok=True)
        del kept[name]
    if gone:
        write_json(folder / KEPT, kept)
        say(f"removed {len(gone):,} staged files that {url} has no more: {gone[0]}{', ...' if gone[1:] else ''}")


def _fetch_all(
    bucket: Any, url: str, todo: list[Object], folder: Path, kept: dict[str, list[Any]], missing: int, say: Say
) -> None:
    stop, lock, done = threading.Event(), threading.Lock(), 0

    def count(nbytes: int) -> None:
        nonlocal done
        with lock:
            done += nbytes

    def one(o: Object) -> Object:
        with _errors(f"{url}/{o.name}", folder):
            _fetch_one(bucket, o, folder, count, stop)
        return o

    started = said = time.monotonic()
    pool = ThreadPoolExecutor(THREADS, thread_name_prefix="eyas-stage")
    # A folder whose fetching was stopped shall not look like a store with holes: its journals come last.
    last = [Path(o.name).name.startswith(("journal-", "manifest.json")) for o in todo]
    try:
        for turn in (False, True):
            queue = deque(o for o, late in zip(todo, last, strict=True) if late == turn)
            waiting: set[Future[Object]] = set()
            while queue or waiting:
                while queue and len(waiting) < 4 * THREADS:
                    waiting.add(pool.submit(one, queue.popleft()))
                ready, waiting = wait(waiting, timeout=SAY_SECONDS, return_when=FIRST_COMPLETED)
                for o in (future.result() for future in ready):
                    kept[o.name] = [o.size, o.etag]
                now = time.monotonic()
                if now - said >= SAY_SECONDS and waiting:
                    said, rate = now, done / (now - started)
                    left = f" · {(missing - done) / rate:,.0f} s left" if rate else ""
                    say(f"fetched {size_text(done)} of {size_text(missing)} · {rate / 1e6:,.0f} MB/s{left}")
                    write_json(folder / KEPT, kept)
    finally:
        stop.set()
        pool.shutdown(wait=True, cancel_futures=True)
        write_json(folder / KEPT, kept)
    seconds = time.monotonic() - started
    say(f"fetched {size_text(missing)} in {seconds:,.1f} s ({missing / max(seconds, 1e-9) / 1e6:,.0f} MB/s)")


def _fetch_one(bucket: Any, o: Object, folder: Path, count: Callable[[int], None], stop: threading.Event) -> None:
    """One object to its file, from where an earlier run stopped. Raises what obstore raises, OSError, EyasError."""
    import obstore

    side, target = _side(folder, o), folder / o.name
    side.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(side, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        at = _begun(folder, o)
        os.ftruncate(fd, at)
        while at < o.size:
            if stop.is_set():
                return
            options: dict[str, Any] = {"range": (at, min(at + PIECE, o.size))}
            if o.etag:
                options["if_match"] = o.etag
            piece = memoryview(obstore.get(bucket, o.name, options=options).bytes())
            if not len(piece):
                raise EyasError(f"{o.name} ends at byte {at:,} of {o.size:,}")
            written = 0
            while written < len(piece):
                written += os.pwrite(fd, piece[written:], at + written)
            at += len(piece)
            count(len(piece))
        os.fsync(fd)
    finally:
        os.close(fd)
    side.rename(target)
    sync_folder(target.parent)


def _side(folder: Path, o: Object) -> Path:
    """The name of a file that is not whole yet; another one for another content."""
    target = folder / o.name
    return target.with_name(f".{target.name}.{xxhash.xxh3_64_hexdigest(f'{o.size} {o.etag}'.encode())}.part")


def _begun(folder: Path, o: Object) -> int:
    """Bytes of the object that an earlier run fetched; without an etag nobody knows whether they are still its own."""
    try:
        size = _side(folder, o).stat().st_size
    except OSError:
        return 0
    return size if o.etag and size <= o.size else 0


def _is_here(folder: Path, o: Object, kept: dict[str, list[Any]]) -> bool:
    try:
        return (folder / o.name).stat().st_size == o.size and kept.get(o.name) == [o.size, o.etag]
    except OSError:
        return False


def _kept(folder: Path) -> dict[str, list[Any]]:
    try:
        kept = json.loads((folder / KEPT).read_bytes())
    except (OSError, ValueError):
        return {}
    return kept if isinstance(kept, dict) else {}


@contextlib.contextmanager
def _errors(what: str, folder: Path | None) -> Iterator[None]:
    """obstore's errors, which take a page, as one line."""
    from obstore import exceptions as known

    try:
        yield
    except known.BaseError as error:
        text = " ".join(str(error).split())
        where = f" (what was fetched stays in {folder})" if folder is not None and folder.exists() else ""
        if isinstance(error, known.NotFoundError) or "NoSuchBucket" in text:
            why = "is not there: check the name of the bucket and the path"
        elif isinstance(error, (known.PermissionDeniedError, known.UnauthenticatedError)) or re.search(
            "forbidden|credential", text, re.IGNORECASE
        ):
            why = (
                "is refused without other credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE;"
            )
            why += " for a public bucket AWS_SKIP_SIGNATURE=true"
        elif isinstance(error, known.PreconditionError):
            why = f"changed while it was fetched: run the same command again{where}"
        else:
            said = re.split(r" Debug source|, after \d+ retries| in [\d.]+m?s", text)[0].removeprefix(
                "Generic S3 error: "
            )
            why = f"cannot be read: {said[:160]}: check the network and AWS_ENDPOINT_URL, and run the same command"
            why += f" again{where}"
        raise EyasError(f"{what} {why}") from None
