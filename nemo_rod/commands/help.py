"""`nemo-rod help`: one line per command."""

USAGE = """nemo-rod: continued pretraining with replay on demand

  nemo-rod run recipe=toy             every stage of a recipe, skipping what is done
  nemo-rod run recipe=toy dry_run=true            what would run
  nemo-rod plan recipe=toy                        what it would cost: tokens, time, memory, disk
  nemo-rod rehearse recipe=NAME                   a scaled-down run of it, in minutes
  nemo-rod run -m recipe=toy seed=1,2             a sweep: one run folder each

One stage at a time:
  nemo-rod prepare   recipe=NAME                  text -> blocks
  nemo-rod pretrain  recipe=NAME                  the base model
  nemo-rod reference recipe=NAME                  reference losses
  nemo-rod train     recipe=NAME arm=ARM          one arm
  nemo-rod merge     recipe=NAME arm=merge_0.4    weights between base and specialist
  nemo-rod evaluate  recipe=NAME                  held-out losses of every arm
  nemo-rod evaluate  recipe=NAME tasks=paper      and benchmarks, through lm-eval
  nemo-rod evaluate  recipe=NAME arm=ARM step=N   held-out losses of a saved step
  nemo-rod export    recipe=NAME arm=ARM step=N   a saved step as a Hugging Face checkpoint
  nemo-rod report    recipe=NAME                  tables, figures and the page

On NeMo-RL, with a recipe in its own form (docs/nemo-rl.md):
  nemo-rod train     --config RECIPE.yaml [key=value ...]
  nemo-rod reference --config RECIPE.yaml rod.role=replay [key=value ...]

Without a recipe:
  nemo-rod status RUN_DIR                         what ran, where, its progress and its end
  nemo-rod status RUN_DIR --watch                 the same with bars, updated
  nemo-rod serve RUN_DIR [port=8008]              the page of a run under way, updated
  nemo-rod cancel RUN_DIR                         ends what launcher=slurm or ray submitted
  nemo-rod inspect PATH [block=ID]                what any of our files or folders holds
  nemo-rod curriculum export|verify|diff PATH ... a run's curriculum: to parquet, checked, compared
  nemo-rod reference job=FILE.py:FUNCTION role=ROLE out=FOLDER roles={PATH: ROLE, ...} ...
                                                  reference losses of your own job's data
  nemo-rod merge BASE ADAPTED OUT lambda=WEIGHT   weights between two checkpoints of your own
  nemo-rod doctor                                 what is installed, and what works here

`train` and `reference` take a recipe unless --config is given, `reference` also unless job= is, and
`merge` unless lambda= is given or its first argument is a folder.
`nemo-rod COMMAND --help` explains train, reference, merge and every command without a recipe.

Keys: recipe arms arm seed run_dir parallel rebuild dry_run train.* selection.* ...
`nemo-rod run recipe=NAME --cfg job` shows all of them with their values.
"""
