"""Controls of the paper's appendix A.1: the score of the base, and a reference of a mixture."""

from pathlib import Path

import numpy as np
import pytest
from command_line import composed

torch = pytest.importorskip("torch")

from architectures import tensors  # noqa: E402

from nemo_rod.config import Parallel  # noqa: E402
from nemo_rod.run.run_folder import RunFolder  # noqa: E402
from nemo_rod.run.stages import Stages  # noqa: E402
from nemo_rod.selection import Curriculum  # noqa: E402

BLOCKS = {"num_adaptation": 900, "num_replay": 3000, "digest": "d"}


def test_the_offline_arm_follows_the_base_and_the_single_reference_is_of_a_mixture():
    jobs = Stages(composed("recipe=toy_controls", "seed=3", "run_dir=runs/here")).jobs
    offline = jobs.arm("rod_offline", BLOCKS)
    assert offline.recorded == "runs/here/arms/rod_offline_scores/curriculum.rod"
    assert offline.follow_by is None  # the blocks themselves
    assert jobs.settings("rod_offline").waits_for == "rod_offline_scores"
    assert not jobs.settings("rod_offline").scores
    base, mixed = jobs.references(jobs.settings("rod_mixture"))
    assert base == RunFolder(Path("runs/here"), "toy_controls").reference("base")
    other = Stages(composed("recipe=toy_mixture", "seed=3", "run_dir=runs/toy_mixture/seed_3"))
    assert mixed == other.results.reference("specialist")
    assert other.jobs.settings("no_replay").of == "fixed_50"
    assert other.jobs.arm("no_replay", BLOCKS).retention == pytest.approx(0.3)  # 900 of 3,000


def test_a_model_that_does_not_move_scores_as_the_base(tiny, tmp_path):
    recorder = Stages(composed("recipe=toy_controls")).jobs.settings("rod_offline_scores")
    values = {"model": tiny.base, "steps": 12, "references": tiny.references}
    file = tiny._job("rod", tmp_path, Parallel(), lr=recorder.train.lr, **values)
    tiny.torchrun(1, "nemo_rod.megatron", file)
    scores: dict[int, float] = {}
    for record in Curriculum.open(tmp_path / "curriculum.rod", read_only=True):
        replay = tiny.store.is_replay(record.block_ids)
        assert (record.score[replay] == 0).all()
        for block, score in zip(record.block_ids.tolist(), record.score.tolist(), strict=True):
            assert scores.setdefault(block, score) == score  # whenever it is drawn
    assert np.std([*scores.values()]) > 0
    before, after = tensors(tiny.base), tensors(tmp_path / "hf")
    assert all(torch.equal(before[name], after[name]) for name in before)
