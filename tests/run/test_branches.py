"""Branches of an arm are the unbroken arms with their schedules."""

import pytest

pytest.importorskip("torch")

from command_line import composed
from tiny_recipe import RECIPE, SCHEDULED, assert_is_the_unbroken_arm

from nemo_rod.run import branches
from nemo_rod.run.checks import check
from nemo_rod.selection import Curriculum


@pytest.mark.parametrize(("name", "at", "steps"), [("end", 2, 5), ("longer", 4, 8)])
def test_a_branch_is_the_unbroken_arm(small_run, name, at, steps):
    arms = [small_run / "arms" / arm for arm in (name, f"{name}_unbroken", "rod")]
    assert_is_the_unbroken_arm(*arms, at, steps)


def test_a_branch_that_was_killed_as_it_began_begins_again(small_run, tmp_path):
    (tmp_path / "checkpoints.partial/iter_0000002").mkdir(parents=True)
    (tmp_path / "curriculum.rod").write_bytes(b"cut")
    for _ in range(2):  # the second finds that all is there
        branches.begin(tmp_path, small_run / "arms/rod", 2, "digest")
    with Curriculum.open(tmp_path / "curriculum.rod") as curriculum:
        assert (len(curriculum), curriculum.header.config) == (2, "digest")
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["iter_0000002"]
    with pytest.raises(ValueError, match=r"step=3 has no checkpoint .*one of 2, 4, 6;"):
        branches.begin(tmp_path / "other", small_run / "arms/rod", 3, "digest")


@pytest.mark.parametrize(
    ("variant", "more", "sentence"),
    [
        ({"at": 2}, {}, "at=2 is set alone: set anneal, steps or both"),
        ({"anneal": 2}, {}, "anneal is set without at"),
        ({"at": 6, "anneal": 2}, {}, "at=6 is not valid: expected 1 to 4, where the learning rate"),
        ({"of": "longer", "at": 2, "steps": 8}, {}, "at=2 is not valid: expected 4 to 6, where"),
        ({"at": 4, "steps": 5}, {}, "at=4 is not valid: expected 1 to 3, where"),
        ({"at": 3, "anneal": 2}, {}, r"at=3 is not saved, as checkpoint\.every=2"),
        ({"at": 2, "anneal": 2}, {"keep": 2}, r"at=2 is not kept.*set checkpoint\.keep=3"),
        ({"at": 2, "anneal": 2, "budget": 2.0}, {}, "is a branch, which has only of, at, anneal"),
        ({"of": "end", "budget": 2.0}, {}, "end is a branch, which .*: vary its trunk"),
        ({"of": "no_replay_converged", "at": 2, "anneal": 2}, {}, "whose end is open"),
    ],
)
def test_branches_that_cannot_be(variant, more, sentence):
    config = composed(*RECIPE, *SCHEDULED, "arms=[base,rod]")
    config.checkpoint.keep = more.get("keep", 3)
    config.arms.append("mine")
    config.variants["mine"] = {"of": "rod", **variant}
    with pytest.raises(ValueError, match=f"^variants.*{sentence}"):
        check(config)
