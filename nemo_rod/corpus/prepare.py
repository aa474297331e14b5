"""`prepare`: builds a block store from a description of its sources.

Sources are built one at a time, each in its own folder below ``<root>/.partial``, and renamed into
place atomically. Existing sources that match are kept; those built with other settings are refused.
After any interruption, the next run resumes where the last one stopped.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from nemo_rod.corpus.build_source import Progress, Settings, build_source, describe
from nemo_rod.corpus.documents import ROLES, SourceSpec
from nemo_rod.corpus.encode import Encoder
from nemo_rod.corpus.hashing import is_holdout
from nemo_rod.corpus.pack import Packer
from nemo_rod.corpus.resplit import thin
from nemo_rod.corpus.shards import BLOCKS_PER_SHARD, SCHEMA
from nemo_rod.corpus.store import BlockStore
from nemo_rod.corpus.tokenizer import Tokenizer
from nemo_rod.files import read_json, sync, write_json

_PARTIAL = ".partial"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Some cluster file systems have no locks: there, users must start only one run at a time.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)


def prepare(
    root: str | os.PathLike[str],
    sources: Sequence[SourceSpec],
    *,
    tokenizer: Tokenizer,
    block_size: int,
    holdout_fraction: float = 0.01,
    holdout_seed: int = 42,
    holdout_floor: int = 0,
    replay_ratio: float | None = None,
    workers: int = 1,
    progress: Progress | None = None,
    rebuild: bool = False,
    checkpoint_seconds: float = 10.0,
    blocks_per_shard: int = BLOCKS_PER_SHARD,
) -> BlockStore:
    """Reads, tokenises, packs and splits the sources into blocks.

    The files are byte-identical for any number of workers and any interruptions. Memory does not
    grow with the corpus, but for 8 bytes a block where `holdout_floor` or `replay_ratio` is set.

    Args:
        root: The store's folder.
        sources: Sources to read, with distinct names.
        tokenizer: Tokenizer of the documents.
        block_size: Tokens per block (S).
        holdout_fraction: Fraction of each source that is held out.
        holdout_seed: Seed that selects what is held out.
        holdout_floor: Held-out blocks of a source at least, to a fifth of it.
        replay_ratio: Replay blocks at most, per adaptation block: all replay sources lose the same
            share of their blocks. None keeps all.
        workers: Number of tokenising processes, each on one core; 1 uses the current process.
        progress: Called repeatedly with (bytes read, total bytes or None, label).
        rebuild: Rebuild existing sources that have other settings, and remove those that are no
            longer listed.
        checkpoint_seconds: Maximum time lost if the run is killed.
        blocks_per_shard: Maximum number of blocks per file.

    Returns:
        The store's training blocks.

    Raises:
        ValueError: A source cannot be read, is too small, or exists with other settings; nothing
            unfinished of that source remains. Or the disk is full; unfinished work is kept for the
            next run.
    """
    root = Path(root)
    settings = Settings(
        tokenizer=tokenizer, block_size=block_size, holdout_fraction=holdout_fraction,
        holdout_seed=holdout_seed, blocks_per_shard=blocks_per_shard, replay_ratio=replay_ratio,
        checkpoint_seconds=checkpoint_seconds, holdout_floor=holdout_floor,
    )  # fmt: skip
    _check_arguments(sources, settings)
    root.mkdir(parents=True, exist_ok=True)
    with _alone(root), _setbacks(root), Encoder(tokenizer, workers) as encoder:
        _prepare_all(root, sources, settings, encoder, progress or _silent, rebuild)
    return BlockStore(root)


def _prepare_all(
    root: Path,
    sources: Sequence[SourceSpec],
    settings: Settings,
    encoder: Encoder,
    progress: Progress,
    rebuild: bool,
) -> None:
    _check_strangers(root, sources, rebuild)

    def build(spec: SourceSpec) -> None:
        _prepare_source(root, spec, settings, encoder, progress, rebuild)

    for spec in sources:
        build(spec)
    if settings.replay_ratio is not None:
        _thin_replay(root, sources, settings, build, rebuild)
    _write_listing(root, sources)


def _prepare_source(
    root: Path,
    spec: SourceSpec,
    settings: Settings,
    encoder: Encoder,
    progress: Progress,
    rebuild: bool,
) -> None:
    target = root / spec.role / spec.name
    if target.exists():
        difference = _difference(target, describe(spec, settings))
        if difference is None:
            return
        if not rebuild:
            raise ValueError(
                f"the blocks in {target} were made otherwise: {difference}; restore the former "
                "value, or set rebuild=[prepare] (in Python, rebuild=True) to make them again"
            )
    (root / "store.json").unlink(missing_ok=True)  # from here on the store is incomplete
    partial = root / _PARTIAL / f"{spec.role}-{spec.name}"
    try:
        made = build_source(partial, spec, settings, encoder, progress)
    except ValueError:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    _replace(target, made)
    shutil.rmtree(partial)


def _replace(target: Path, made: Path) -> None:
    if target.exists():
        shutil.rmtree(target)
    target.parent.mkdir(exist_ok=True)
    made.rename(target)
    sync(target.parent)


def _thin_replay(
    root: Path,
    sources: Sequence[SourceSpec],
    settings: Settings,
    build: Callable[[SourceSpec], None],
    rebuild: bool,
) -> None:
    """Thins all replay sources to the same share, if there is more replay than asked for."""
    assert settings.replay_ratio is not None
    manifests = [read_json(root / s.role / s.name / "manifest.json", "count") for s in sources]
    whole = dict.fromkeys(ROLES, 0)
    for manifest in manifests:
        whole[manifest["role"]] += manifest.get("thinned", {"of": manifest["count"]})["of"]
    share = min(1.0, settings.replay_ratio * whole["adaptation"] / max(1, whole["replay"]))
    for spec, manifest in zip(sources, manifests, strict=True):
        if spec.role != "replay":
            continue
        target, found = root / spec.role / spec.name, manifest.get("thinned")
        if share == (found["share"] if found else 1.0):
            continue
        (root / "store.json").unlink(missing_ok=True)
        if found:
            if not rebuild:
                raise ValueError(
                    f"{target} keeps a share of {found['share']:.4f} of its blocks, and the other "
                    f"sources now leave {share:.4f}: set rebuild=[prepare] (in Python, "
                    "rebuild=True) to make it again"
                )
            shutil.rmtree(target)
            build(spec)
        thinned = root / _PARTIAL / f"thinned-{spec.name}"
        if share < 1.0:
            _replace(target, thin(target, thinned, share=share, seed=settings.holdout_seed))


def _check_arguments(sources: Sequence[SourceSpec], settings: Settings) -> None:
    if not sources:
        raise ValueError("domain.sources names no source: give at least one")
    names = [spec.name for spec in sources]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"domain.sources names {name!r} twice: names must differ")
    Packer(settings.block_size, settings.tokenizer.eod_id)
    is_holdout([], fraction=settings.holdout_fraction, seed=settings.holdout_seed)


def _check_strangers(root: Path, sources: Sequence[SourceSpec], rebuild: bool) -> None:
    wanted = {(spec.role, spec.name) for spec in sources}
    for role in ROLES:
        for folder in sorted((root / role).glob("*")):
            if (role, folder.name) in wanted:
                continue
            if not rebuild:
                raise ValueError(
                    f"{folder} holds blocks of a source that domain.sources does not name: add the "
                    "source, remove the folder, or set rebuild=[prepare] (in Python, "
                    "rebuild=True) to have it removed"
                )
            (root / "store.json").unlink(missing_ok=True)
            shutil.rmtree(folder)


def _difference(target: Path, description: Mapping[str, Any]) -> str | None:
    """Returns the first setting in which existing blocks differ from the description."""
    try:
        found = json.loads((target / "manifest.json").read_text("utf-8"))
        found["files"] = [{"name": f["name"], "bytes": f["bytes"]} for f in found["files"]]
        known = _flat(found)
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        return "their manifest.json cannot be read"
    wanted = json.loads(json.dumps(description))
    for key, value in _flat(wanted).items():
        before = known.get(key)
        if before != value:
            return f"{key} was {before!r} and is now {value!r}"
    return None


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, item in value.items():
        if key == "files":
            flat["files"] = [file["name"] for file in item]
            flat |= {f"size of {file['name']}": file["bytes"] for file in item}
        elif isinstance(item, Mapping):
            flat |= _flat(item, f"{prefix}{key}.")
        else:
            flat[prefix + key] = item
    return flat


def _write_listing(root: Path, sources: Sequence[SourceSpec]) -> None:
    listing = {
        "schema": SCHEMA,
        "sources": [
            {"role": spec.role, "name": spec.name}
            for spec in sorted(sources, key=lambda spec: (ROLES.index(spec.role), spec.name))
        ],
    }
    write_json(root / "store.json", listing)


@contextmanager
def _alone(root: Path) -> Iterator[None]:
    """Locks the folder against a second run."""
    partial = root / _PARTIAL
    partial.mkdir(exist_ok=True)
    with (partial / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another run is preparing {root}: wait until it is done") from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        try:
            yield
            shutil.rmtree(partial)
        finally:
            (partial / "lock").unlink(missing_ok=True)
            for folder in (partial, root):
                with suppress(OSError):  # not empty: it holds work for the next run to resume
                    folder.rmdir()


@contextmanager
def _setbacks(root: Path) -> Iterator[None]:
    """Reports failures not caused by the sources, which keep the unfinished work."""
    try:
        yield
    except BrokenProcessPool:
        raise ValueError(
            "a tokenising process was ended from outside, most likely for want of memory: run "
            "prepare again with fewer workers, it resumes where it stopped"
        ) from None
    except OSError as error:
        if error.errno not in _FULL:
            raise
        free = shutil.disk_usage(root).free
        raise ValueError(
            f"no room left for the blocks in {root} ({error.strerror}, {free / 1e9:.1f} GB free): "
            "make room and run prepare again, it resumes where it stopped"
        ) from error


def _silent(done: int, total: int | None, what: str) -> None:
    """Discards the progress."""
