"""`prepare`: builds a block store from a description of its sources.

Sources are built one at a time, each in its own folder below ``<root>/.partial``, and renamed into
place atomically. Existing sources that match stay; those built with other settings are refused.
After any interruption, the next run resumes where the last one stopped.

No folder is removed or replaced in place, since a kill would leave half of it: it is renamed to
``.partial/gone`` before its files are removed, and to ``.partial/before-<role>-<name>`` until its
replacement is in place.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_rod.corpus.build_source import Progress, Settings, build_source, describe
from nemo_rod.corpus.documents import open_inputs
from nemo_rod.corpus.encode import Encoder
from nemo_rod.corpus.formats import ReadError
from nemo_rod.corpus.hashing import is_holdout
from nemo_rod.corpus.pack import Packer
from nemo_rod.corpus.resplit import RAISED, further_held_out, raise_holdout, thin
from nemo_rod.corpus.shards import BLOCKS_PER_SHARD, SCHEMA
from nemo_rod.corpus.sources import SourceSpec, check_sources
from nemo_rod.corpus.store import BlockStore
from nemo_rod.corpus.tokenizer_identity import Tokenizer
from nemo_rod.files import FULL, flat, lock, read_json, sync, write_json
from nemo_rod.roles import ROLES


def prepare(
    root: str | os.PathLike[str],
    sources: Sequence[SourceSpec],
    *,
    tokenizer: Tokenizer,
    block_size: int,
    holdout_fraction: float = 0.01,
    holdout_seed: int = 42,
    holdout_floor: int | None = None,
    replay_ratio: float | None = None,
    workers: int = 1,
    progress: Progress = lambda done, total, label: None,
    rebuild: bool = False,
    checkpoint_seconds: float = 10.0,
    blocks_per_shard: int = BLOCKS_PER_SHARD,
    encoder: type[Encoder] = Encoder,
) -> BlockStore:
    """Reads, tokenises, packs and splits the sources into blocks.

    The files are byte-identical for any number of workers and any interruptions. Memory does not
    grow with the corpus, but for at most 40 bytes a block of a source that `holdout_floor` or
    `replay_ratio` changes.

    Args:
        root: the store's folder.
        sources: sources to read, with distinct names.
        tokenizer: tokenizer of the documents.
        block_size: tokens per block (S).
        holdout_fraction: fraction of each source that is held out.
        holdout_seed: seed that selects what is held out.
        holdout_floor: held-out blocks of a source at least, up to a fifth of its blocks after
            `replay_ratio`: see `further_held_out`. None: 1, or 0 if `holdout_fraction` is 0.
        replay_ratio: replay blocks at most, per adaptation block: all replay sources lose the same
            share of their blocks. None keeps all.
        workers: number of tokenising processes, each on one core; 1 uses the current process.
        progress: called repeatedly with (bytes read, total bytes or None, label).
        rebuild: rebuild existing sources that have other settings, and remove those that are no
            longer listed.
        checkpoint_seconds: maximum time lost if the run is killed.
        blocks_per_shard: maximum number of blocks per file.
        encoder: reads and tokenises.

    Returns:
        The store's training blocks.

    Raises:
        ValueError: a source cannot be read, is too small, or exists with other settings; nothing
            unfinished of that source remains. Or settings exclude each other. Or the disk is full;
            unfinished work is kept for the next run.
    """
    root = Path(root)
    settings = Settings(
        tokenizer=tokenizer, block_size=block_size, holdout_fraction=holdout_fraction,
        holdout_seed=holdout_seed, blocks_per_shard=blocks_per_shard, replay_ratio=replay_ratio,
        checkpoint_seconds=checkpoint_seconds, holdout_floor=holdout_floor,
    )  # fmt: skip
    check_sources(sources, holdout_floor)
    Packer(block_size, tokenizer.eod_id)  # refuses a block without a target
    is_holdout([], fraction=holdout_fraction, seed=holdout_seed)  # and another fraction, or seed
    root.mkdir(parents=True, exist_ok=True)
    with _locking(root) as partial, encoder(tokenizer, workers) as running:
        _Preparation(root, partial, sources, settings, running, progress, rebuild).run()
    return BlockStore(root)


@dataclass(frozen=True)
class _Preparation:
    """State of one `prepare` call: its locked folder and its running encoder."""

    root: Path
    partial: Path
    sources: Sequence[SourceSpec]
    settings: Settings
    encoder: Encoder
    progress: Progress
    rebuild: bool

    def run(self) -> None:
        for before in sorted(self.partial.glob("before-*")):  # left by killed replacements
            target = self.root.joinpath(*before.name.split("-", 2)[1:])
            if target.exists():
                self._discard(before)
            else:
                before.rename(target)
        targets = [self._target(spec) for spec in self.sources]
        for folder in [path for role in ROLES for path in sorted((self.root / role).glob("*"))]:
            if folder not in targets:
                if not self.rebuild:
                    raise ValueError(
                        f"{folder} holds blocks of a source that domain.sources does not name: add "
                        "the source, remove the folder, or set rebuild=[prepare] (in Python, "
                        "rebuild=True) to have it removed"
                    )
                self._listing.unlink(missing_ok=True)
                self._discard(folder)
        for spec in self.sources:
            # refuses an unreadable source before hours of work
            open_inputs(spec, self.settings.tokenizer)
        for spec in self.sources:
            self._build(spec)
        if self.settings.replay_ratio is not None:
            self._thin_replay(self.settings.replay_ratio)
        if not self._listing.exists():  # else nothing has changed
            self._raise_holdouts()
        ordered = sorted((ROLES.index(spec.role), spec.name) for spec in self.sources)
        names = [{"role": ROLES[role], "name": name} for role, name in ordered]
        write_json(self._listing, {"schema": SCHEMA, "sources": names})

    @property
    def _listing(self) -> Path:
        """The file without which the store is incomplete."""
        return self.root / "store.json"

    def _target(self, spec: SourceSpec) -> Path:
        return self.root / spec.role / spec.name

    def _replace(self, spec: SourceSpec, made: Path) -> None:
        """Moves a finished folder to its place; the former one stays whole until then."""
        target, before = self._target(spec), self.partial / f"before-{spec.role}-{spec.name}"
        if target.exists():
            target.rename(before)
        target.parent.mkdir(exist_ok=True)
        made.rename(target)
        sync(target.parent)
        self._discard(before)

    def _discard(self, folder: Path) -> None:
        """Removes a folder, if there is one; a kill never leaves half of it in its place."""
        gone = self.partial / "gone"
        shutil.rmtree(gone, ignore_errors=True)
        if folder.is_symlink() or folder.is_file():  # a user may have put it there
            folder.unlink()
        elif folder.exists():
            folder.rename(gone)
            shutil.rmtree(gone)

    def _build(self, spec: SourceSpec, stale: str | None = None) -> None:
        """Builds a source, unless it is there as described and nothing else makes it `stale`."""
        target, partial = self._target(spec), self.partial / f"{spec.role}-{spec.name}"
        if target.exists():
            stale = stale or _difference(target, describe(spec, self.settings, open_inputs(spec)))
            if stale is None:
                self._discard(partial)  # its state describes blocks that are no longer in it
                return
            if not self.rebuild:
                raise ValueError(
                    f"{stale}; restore the former value, or set rebuild=[prepare] (in Python, "
                    "rebuild=True) to make them again"
                )
        self._listing.unlink(missing_ok=True)
        try:
            made = build_source(partial, spec, self.settings, self.encoder, self.progress)
        except ValueError as error:
            if not isinstance(error, ReadError) or not (partial / "state.json").exists():
                self._discard(partial)
            raise
        self._replace(spec, made)
        self._discard(partial)

    def _thin_replay(self, ratio: float) -> None:
        """Thins all replay sources to the same share, if there is more replay than allowed."""
        manifests = [read_json(self._target(s) / "manifest.json", "count") for s in self.sources]
        whole = dict.fromkeys(ROLES, 0)
        for manifest in manifests:
            count = manifest["count"] + manifest.get(RAISED, 0)
            whole[manifest["role"]] += manifest.get("thinned", {"of": count})["of"]
        share = min(1.0, ratio * whole["adaptation"] / max(1, whole["replay"]))
        for spec, manifest in zip(self.sources, manifests, strict=True):
            before = manifest.get("thinned", {"share": 1.0})["share"]
            if spec.role != "replay" or share == before:
                continue
            self._listing.unlink(missing_ok=True)
            if before < 1.0 or RAISED in manifest:
                self._build(
                    spec,
                    f"{self._target(spec)} keeps a share of {before:.4f} of its blocks, and the "
                    f"other sources now leave {share:.4f}",
                )
            self._thin(spec, share)

    def _thin(self, spec: SourceSpec, share: float) -> None:
        work, seed = self.partial / f"thinned-{spec.name}", self.settings.holdout_seed
        if share < 1.0:
            self._replace(spec, thin(self._target(spec), work, share=share, seed=seed))

    def _raise_holdouts(self) -> None:
        """Holds out further blocks, of all sources together, where there are too few."""
        targets, settings = [self._target(spec) for spec in self.sources], self.settings
        further = further_held_out(targets, floor=settings.floor, seed=settings.holdout_seed)
        for spec, target, (hashes, before) in zip(self.sources, targets, further, strict=True):
            if hashes == before:
                continue
            if before:
                thinned = read_json(target / "manifest.json").get("thinned", {"share": 1.0})
                self._build(
                    spec, f"{target} holds out other blocks than the other sources now ask for"
                )
                self._thin(spec, thinned["share"])
            if hashes:
                work = self.partial / f"raised-{spec.role}-{spec.name}"
                self._replace(spec, raise_holdout(target, work, hashes))
        for spec, target in zip(self.sources, targets, strict=True):
            train, held = (
                read_json(split / "manifest.json", "count")["count"]
                for split in (target, target / "holdout")
            )
            if train and (held or not (settings.floor or settings.holdout_fraction)):
                continue
            self._discard(target)
            with suppress(OSError):  # other sources are in it
                target.parent.rmdir()
            side = "none of them is" if train else "all of them are"
            raise ValueError(
                f"{spec.role} source {spec.name} has {train + held} blocks and {side} held out: "
                "equal blocks, of all sources, stay together, and holdout_floor moves a fifth of a "
                "source at most; give it more text, drop repeated text, as dedup does, or lower a "
                "holdout_fraction near 1"
            )


def _difference(target: Path, description: Mapping[str, Any]) -> str | None:
    """Returns a clause on the first setting in which existing blocks differ from these."""

    def settings(manifest: Mapping[str, Any]) -> dict[str, Any]:
        flattened = flat(manifest)
        for key in {"files", "dataset_files"} & manifest.keys():
            flattened[key] = [file["name"] for file in manifest[key]]
            for number, file in enumerate(manifest[key], 1):  # several may have one name
                flattened[f"size of {file['name']} (file {number})"] = file["bytes"]
                flattened[f"share of {file['name']} (file {number})"] = file.get("share", 1.0)
        return flattened

    try:
        existing = settings(json.loads((target / "manifest.json").read_text("utf-8")))
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        return f"the blocks in {target} were made otherwise: their manifest.json cannot be read"
    current = settings(json.loads(json.dumps(description)))
    for key in [*current, *(key for key in existing if key.startswith("reading."))]:
        if existing.get(key) != current.get(key):
            change = f"{key} was {existing.get(key)!r} and is now {current.get(key)!r}"
            return f"the blocks in {target} were made otherwise: {change}"
    return None


@contextmanager
def _locking(root: Path) -> Iterator[Path]:
    """Locks the folder, yields the one for unfinished work, and explains failures that keep it."""
    partial = root / ".partial"
    partial.mkdir(exist_ok=True)
    with (partial / "lock").open("w") as file:
        # Without locks in the file system, users must start only one run at a time.
        if not lock(file.fileno()):
            raise ValueError(f"another run is preparing {root}: wait until it is done")
        try:
            yield partial
            shutil.rmtree(partial)
        except BrokenProcessPool:
            raise ValueError(
                "a tokenising process was ended from outside, most likely for want of memory: run "
                "prepare again with fewer workers, it resumes where it stopped"
            ) from None
        except OSError as error:
            if error.errno not in FULL:
                raise
            free = shutil.disk_usage(root).free
            raise ValueError(
                f"no room left for the blocks in {root} ({error.strerror}, {free / 1e9:.1f} GB "
                "free): make room and run prepare again, it resumes where it stopped"
            ) from error
        finally:
            (partial / "lock").unlink(missing_ok=True)
            for folder in (partial, root):
                with suppress(OSError):  # not empty: it holds work for the next run to resume
                    folder.rmdir()
