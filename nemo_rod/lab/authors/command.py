"""`nemo-rod import blocks|references|curriculum`: artifacts of the authors' code."""

from __future__ import annotations

import sys
from argparse import Namespace
from functools import partial
from pathlib import Path

from nemo_rod.commands.arguments import Arguments, Key
from nemo_rod.lab.text import add_verb
from nemo_rod.roles import ROLES


def declare(parser: Arguments) -> None:
    """Declares the arguments of `nemo-rod import`."""
    names = "blocks|references|curriculum"
    verbs = parser.add_subparsers(metavar=names, required=True, prog=parser.prog)
    add = partial(add_verb, parser, verbs)
    text = "Makes a block store of a folder of the authors' blocks."
    usage = "FOLDER OUT tokenizer=NAME [eod=ID] [pool_share=SHARE] [check=N] [repeated=keep]"
    verb = add(_blocks, "blocks", f"{usage}, or FOLDER RUN_DIR recipe=NAME", text)
    verb.add_argument("folder", metavar="FOLDER", type=Path, help="folder of part_*.parquet")
    verb.add_argument("out", metavar="OUT", type=Path, help="folder of the new store, or of a run")
    compared = "compares one of N blocks with its content_hash, by default 1: all"
    verb.add_keys(
        Key("tokenizer", "NAME", "made the blocks"),
        Key(
            "eod",
            "ID",
            "ends documents; by default the tokenizer's EOS token",
            read=int,
            bound=">= 0",
        ),
        Key("recipe", "NAME", "takes them as its prepared blocks; has the tokenizer, too"),
        Key(
            "pool_share",
            "SHARE",
            "keeps this share of the replay to train on, as data_mixer.replay_share drew it",
            read=float,
            bound="in (0, 1]",
            default=1.0,
        ),
        Key("check", "N", compared, read=int, bound=">= 1", default=1),
        Key(
            "repeated",
            "keep",
            "blocks twice or in both splits; by default they are refused",
            choices=("keep", "refuse"),
            default="refuse",
        ),
    )
    text = "Makes references of a cache of losses, for the training blocks of one role."
    usage = "CACHE OUT blocks=STORE role=ROLE model=MODEL precision=PRECISION"
    verb = add(_references, "references", usage, text)
    verb.add_argument("cache", metavar="CACHE", type=Path, help="folder of refloss_train_*.parquet")
    verb.add_argument("out", metavar="OUT", type=Path, help="folder of the references")
    verb.add_keys(
        Key("blocks", "STORE", "imported block store", required=True),
        Key("role", "ROLE", "of the blocks", choices=ROLES, required=True),
        Key("model", "MODEL", "that scored: a checkpoint, or a name", required=True),
        Key("precision", "PRECISION", "of the pass, such as bf16", required=True),
    )
    text = "Makes a curriculum of a selection trace: a folder per phase of the run, in order."
    verb = add(_curriculum, "curriculum", "TRACE ... OUT blocks=STORE", text)
    verb.add_argument("traces", metavar="TRACE", type=Path, nargs="+", help="folder, or a file")
    verb.add_argument("out", metavar="OUT", type=Path, help="file of the curriculum")
    verb.add_keys(Key("blocks", "STORE", "imported block store", required=True))
    parser.description = "Imports artifacts of bethgelab/replay-on-demand."


def _blocks(options: Namespace) -> None:
    from nemo_rod.corpus.tokenizer import load_tokenizer
    from nemo_rod.files import naming, write_json
    from nemo_rod.lab.authors.blocks import import_blocks
    from nemo_rod.lab.composing import compose_config
    from nemo_rod.progress import Progress
    from nemo_rod.run.stages import Stages

    out, stage, size = options.out, None, None
    if (options.recipe is None) == (options.tokenizer is None) or (options.recipe and options.eod):
        raise ValueError("import blocks takes either tokenizer= and eod=, or recipe=: give one")
    if options.recipe is None:
        tokenizer = load_tokenizer(options.tokenizer, eod=options.eod)
    else:
        config = compose_config(f"recipe={options.recipe}", f"run_dir='{out}'")
        stage, size = Stages(config).prepare(), config.domain.block_size
        out, eod = stage.folder, config.domain.eod
        trusted = config.model.trust_remote_code
        tokenizer = load_tokenizer(config.domain.tokenizer, eod=eod, trust_remote_code=trusted)
    progress = Progress(f"import {options.folder.name}", 0, unit="blocks")
    with naming(out):
        store = import_blocks(
            options.folder,
            out,
            tokenizer,
            block_size=size,
            pool_share=options.pool_share,
            check_every=options.check,
            repeated=options.repeated,
            progress=progress.step,
        )
    if stage is not None and stage.inputs is not None:
        made = {key: getattr(store, key) for key in ("digest", "num_adaptation", "num_replay")}
        record = {"stage": stage.name, "inputs": stage.inputs(), "outputs": made}
        write_json(out / "manifest.json", record | {"note": {"imported": options.folder.name}})
    roles = f"{store.num_adaptation:,} adaptation and {store.num_replay:,} replay blocks"
    print(f"{out}: {roles} of {len(store.sources)} sources, digest {store.digest}")


def _references(options: Namespace) -> None:
    from nemo_rod.corpus import BlockStore
    from nemo_rod.lab.authors.references import import_references
    from nemo_rod.run.base_model import checkpoint_digest

    store, folder = BlockStore(options.blocks), Path(options.model)
    num_scored = import_references(
        options.cache,
        store,
        options.out,
        role=options.role,
        model=checkpoint_digest(folder) if folder.is_dir() else options.model,
        precision=options.precision,
    )
    total = store.num_replay if options.role == "replay" else store.num_adaptation
    print(f"{options.out}: losses of {num_scored:,} of {total:,} {options.role} blocks")


def _curriculum(options: Namespace) -> None:
    from nemo_rod.corpus import BlockStore
    from nemo_rod.lab.authors.trace import import_trace

    store, say = BlockStore(options.blocks), partial(print, file=sys.stderr)
    with import_trace(options.traces, store, options.out, note=say) as curriculum:
        print(
            f"{options.out}: {len(curriculum):,} steps of {curriculum.header.num_chosen:,} blocks"
        )
