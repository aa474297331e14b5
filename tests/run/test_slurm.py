"""A recipe on a real Slurm of two nodes: in order, together, interrupted, and failing.

Its text may be tokenised by several jobs, and joined by another.

`make test-slurm` starts the Slurm on loopback and ends it. It needs Debian's `slurm-wlm` and
`munge`, and takes some ten minutes on two cores.
"""

import contextlib
import json
import shlex
import subprocess
import sys

import pytest
from command_line import composed
from corpus_cases import tree
from places import ROOT
from slurm_chain import ON_SLURM, RECIPE, Chain, copy, nemo_rod, write_job
from slurm_cluster import slurm_cluster, wait_for
from split_texts import recipe_of, write_texts
from tiny_recipe import RECIPE as TINY
from tiny_recipe import SCHEDULED, assert_is_the_unbroken_arm

from nemo_rod.hosts.nemo_rl.on_slurm import RayOnSlurm
from nemo_rod.run.stages import Stages
from tests import lanes

pytestmark = pytest.mark.slurm

ARMS = ("no_replay", "rod")


def test_a_recipe_is_rehearsed_on_two_nodes(cluster, tmp_path):
    """A recipe of the paper, whose eight replicas here fill eight nodes of one GPU each."""
    run = ["recipe=german_qwen3_5_4b", "arms=[no_replay,rod,merge_0.4]", "rehearsal.steps=4"]
    run.append("cluster.gpu=null")  # nodes here have none
    output = nemo_rod("rehearse", *run, *ON_SLURM, f"run_dir={tmp_path}/run", cluster=cluster)
    table = json.loads((tmp_path / "run_rehearsal" / "table.json").read_text())
    assert {row["state"] for row in table["rows"]} <= {"done", "not seen"}
    assert {"materials", "no_replay", "rod", "merge_0.4", "report", "losses"} <= {
        row["name"] for row in table["rows"]
    }
    assert "Rehearsal of german_qwen3_5_4b" in output
    job = (tmp_path / "run_rehearsal" / "launch" / "slurm" / "rod.sbatch").read_text()
    assert "#SBATCH --nodes=2" in job
    assert not (tmp_path / "run").exists()


def test_nodes_whose_names_resolve_nowhere_train_together(tmp_path):
    """Submitted with --export=NONE, which Slurm hands on to srun."""
    own = ["arms=[no_replay]", "pretrain.steps=8", "checkpoint.every=4"]
    options = [*RECIPE, *own, *ON_SLURM, "+cluster.sbatch.export=NONE", f"run_dir={tmp_path}/run"]
    here = [option for option in options if "launcher=" not in option]
    nemo_rod("prepare", *here)
    with slurm_cluster(tmp_path, apart=True) as cluster:
        chain = Chain(cluster, tmp_path / "run", {})
        nemo_rod("pretrain", *options, cluster=cluster)
        cluster.wait(600)
        print(chain.status(), (tmp_path / "run/logs/slurm/base.out").read_text())
        assert chain.job("base")["JobState"] == "COMPLETED"
    assert [e["nodes"] for e in chain.events("base") if "nodes" in e] == ["n[1-2]"]
    weights = tmp_path / "run/base/hf/model.safetensors"
    together = weights.read_bytes()
    nemo_rod("pretrain", *here, "rebuild=[base]")
    assert weights.read_bytes() == together


def test_tests_of_many_gpus_run_over_two_nodes(cluster, tmp_path):
    """`make test-gpus` with GPUS= and PER_NODE=, which here are processes without a GPU."""
    (lane,) = (lane for lane in lanes.LANES if lane.name == "gpus")
    program = [sys.executable, "-m", "pytest", *lane.arguments(), "-k", "pipeline"]
    program += ["-p", "no:cacheprovider", f"--basetemp={tmp_path / 'tests'}"]
    job = ["sbatch", "--wait", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1"]
    job += [f"--chdir={ROOT}", f"--output={tmp_path}/out", "--export=ALL,GPUS=2,PER_NODE=1"]
    done = subprocess.run([*job, f"--wrap={shlex.join(program)}"], env=cluster.environment)
    output = (tmp_path / "out").read_text()
    assert done.returncode == 0 and "1 passed" in output, output
    stages = [file.read_text() for file in tmp_path.glob("tests/torchrun*/launcher.log")]
    assert sum("on n[1-2]" in text for text in stages) == 2  # with the selector, and without


@pytest.fixture(scope="module")
def chain(cluster, tmp_path_factory):
    """The recipe as a chain of jobs, interrupted in three ways."""
    chain = Chain(cluster, tmp_path_factory.mktemp("chain"), {})
    run = ["run", *RECIPE, *ON_SLURM, f"run_dir={chain.run_dir}"]
    print(nemo_rod(*run, cluster=cluster))
    chain.shown["again"] = nemo_rod(*run, cluster=cluster, status=2)

    chain.reach("no_replay", 1, 30)
    chain.preempt("no_replay")
    chain.shown["preempted"] = chain.status()

    # the signal that announces the time limit, as Slurm sends it for --signal=B:USR1@...
    chain.reach("rod", 1, 30)
    chain.shown["running"] = chain.status()
    cluster.ask("scancel", "--batch", "--signal=USR1", chain.numbers["rod"])
    chain.wait_until_stopped("rod")

    # a node fails
    chain.reach("rod", 2, 100)
    cluster.ask("scontrol", "update", "nodename=n2", "state=down", "reason=test")
    wait_for(lambda: chain.job("rod")["Restarts"] == "2", 120, "rod did not go back")
    with contextlib.suppress(subprocess.CalledProcessError):  # it may be back in service already
        cluster.ask("scontrol", "update", "nodename=n2", "state=resume")

    cluster.wait(3000)
    chain.shown["end"] = chain.status()
    for name, text in chain.shown.items():
        print(f"--- status: {name}\n{text}")
    return chain


def test_every_job_completed_after_those_it_needs(chain):
    for stage in chain.numbers:
        assert chain.job(stage)["JobState"] == "COMPLETED"
        assert chain.kinds(stage)[-1] == "done"
    submit = (chain.run_dir / "launch" / "slurm" / "submit.sh").read_text()
    for line in submit.splitlines():
        if line.startswith("submit "):
            _, stage, *needs = line.split()
            for need in needs:
                assert chain.events(need)[-1]["time"] <= chain.events(stage)[0]["time"]


def test_two_nodes_trained_together(chain):
    for stage in ("base", *ARMS):
        assert {e["nodes"] for e in chain.events(stage) if e["event"] == "began"} == {"n[1-2]"}
        assert (chain.run_dir / "logs" / f"{stage}.node1.log").exists()
    # stages without GPU ask for one node
    assert [e["nodes"] for e in chain.events("merge_0.6") if "nodes" in e] in (["n1"], ["n2"])


def test_interrupted_jobs_went_back_into_the_queue(chain):
    assert chain.kinds("no_replay") == ["began", "stopped", "began", "done"]
    assert chain.job("no_replay")["Restarts"] == "1"
    assert chain.kinds("rod")[:3] == ["began", "stopped", "began"]
    assert chain.kinds("rod").count("began") == 3
    assert chain.job("rod")["Restarts"] == "2"


# What a stage may do, in shell: how the job script that all stages share takes it.
ENDINGS = {
    # what the stage does at its 1st, 2nd ... start; state of the job, its exit status, requeues
    "done": (["exit 0"], "COMPLETED", "0:0", 0),
    "failed": (["exit 3"], "FAILED", "3:0", 0),
    "asked to stop": (["exit 75", "exit 0"], "COMPLETED", "0:0", 1),
    "asked to stop before it could answer": (["kill -TERM $$", "exit 0"], "COMPLETED", "0:0", 1),
    "asked to stop, and a node was slow to leave": (
        ['echo "{\\"event\\": \\"stopped\\"}" >>"$RECORD"; kill -KILL $$', "exit 0"],
        "COMPLETED",
        "0:0",
        1,
    ),
    "killed": (["kill -KILL $$"], "FAILED", "137:0", 0),
    "stopped too often": (["exit 75", "exit 75", "exit 75", "exit 0"], "FAILED", "75:0", 2),
    "near its time limit": (["trap 'exit 75' USR1; while true; do sleep 1; done", "exit 0"],
                            "COMPLETED", "0:0", 1),
}  # fmt: skip


@pytest.mark.parametrize("ending", ENDINGS)
def test_job_ends_as_its_stage_did(cluster, tmp_path, ending):
    starts, state, status, requeues = ENDINGS[ending]
    config = composed("recipe=toy_synthetic", *ON_SLURM, "launcher.requeues=2")
    cases = "".join(f"  {number}) {start} ;;\n" for number, start in enumerate(starts))
    (tmp_path / "start.sh").write_text(f"case ${{SLURM_RESTART_COUNT:-0}} in\n{cases}esac\n")
    script = write_job(tmp_path, config, "bash", f"{tmp_path}/start.sh", time="00:02:00")
    number = cluster.ask("sbatch", "--parsable", script)
    cluster.wait(400, number)
    job = cluster.job(number)
    print((tmp_path / "out").read_text())
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == (state, status, str(requeues))


def test_a_job_of_ray_sub_goes_back_near_its_time_limit(cluster, tmp_path):
    (tmp_path / "ray.sub").write_text("((SLURM_RESTART_COUNT > 0)) || { touch $AT; sleep 600; }\n")
    pyxis = ["cluster.image=/an/image.sqsh", f"launcher.nemo_rl={tmp_path}", "launcher.requeues=2"]
    config = composed("recipe=toy_synthetic", *ON_SLURM, *pyxis, "launcher=ray")
    files = RayOnSlurm().render(config, Stages(config).all())
    (tmp_path / "ray.sbatch").write_text(files["ray.sbatch"])
    export = f"--export=ALL,AT={tmp_path}/began,BASE_LOG_DIR={tmp_path}"
    options = ["--requeue", "--open-mode=append", f"--output={tmp_path}/out", "--cpus-per-task=1"]
    script = [str(tmp_path / "ray.sbatch"), str(tmp_path / "record")]
    number = cluster.ask("sbatch", "--parsable", export, *options, *script)
    wait_for((tmp_path / "began").exists, 120, "the job did not begin")
    cluster.ask("scancel", "--batch", "--signal=USR1", number)
    cluster.wait(400, number)
    print((tmp_path / "out").read_text())
    job = cluster.job(number)
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "1")


def test_interrupted_arms_are_those_that_were_not(chain, tmp_path):
    chain.trained_the_same_here(tmp_path, ARMS, *RECIPE)


def test_a_branch_is_a_job_after_its_trunk(cluster, tmp_path):
    """To the bit, it is the unbroken arm, which is a job of its own."""
    recipe = [*TINY, *SCHEDULED, "arms=[rod,end,end_unbroken]"]
    chain = Chain(cluster, tmp_path / "run", {})
    run = [f"run_dir={chain.run_dir}", "report.max_controls=0"]
    nemo_rod("run", *recipe, *ON_SLURM, *run, cluster=cluster)
    cluster.wait(1500)
    assert {chain.job(stage)["JobState"] for stage in chain.numbers} == {"COMPLETED"}
    assert chain.events("rod")[-1]["time"] <= chain.events("end")[0]["time"]
    arms = [chain.run_dir / "arms" / arm for arm in ("end", "end_unbroken", "rod")]
    assert_is_the_unbroken_arm(*arms, at=2, steps=5)


def test_chain_ends_with_evaluation_and_report(chain):
    for arm in ("base", *ARMS, "merge_0.6"):
        result = json.loads((chain.run_dir / "arms" / arm / "evaluation.json").read_text())
        assert result["loss"]["adaptation"]["dialect"] > 0
    assert (chain.run_dir / "report" / "index.html").exists()


def row(status: str, stage: str) -> str:
    (line,) = [line for line in status.splitlines() if line.split()[:1] == [stage]]
    return line


def test_status_told_all_along_how_it_stood(chain):
    preempted = chain.shown["preempted"]
    assert row(preempted, "base").split()[1] == "done"
    assert row(preempted, "no_replay").split()[1] in ("requeued", "running", "completing")
    assert "for references_specialist" in row(preempted, "rod")
    running = row(chain.shown["running"], "rod")
    assert running.split()[1] == "running"
    assert "n[1-2]" in running and "/200" in running and "loss" in running
    assert {line.split()[1] for line in chain.shown["end"].splitlines()[2:]} == {"done"}


def test_second_launch_is_refused_while_one_is_at_work(chain):
    assert "An earlier launch of" in chain.shown["again"]
    assert " --cancel`" in chain.shown["again"]


@pytest.fixture
def begun(chain, tmp_path):
    """A run whose base is there, and nothing after it."""
    copy(chain.run_dir, "blocks", "base", to=tmp_path)
    return Chain(chain.cluster, tmp_path, {})


def test_failed_stage_stops_its_dependents_and_no_other(begun):
    # at this learning rate the loss is soon no number
    options = [*RECIPE, *ON_SLURM, f"run_dir={begun.run_dir}", "train.lr=1e30"]
    nemo_rod("run", *options, cluster=begun.cluster)
    assert "prepare" not in begun.numbers and "base" not in begun.numbers  # done before
    begun.cluster.wait(3000)
    assert begun.job("no_replay")["JobState"] == "FAILED"
    for stage in ("references_specialist", "rod", "merge_0.6", "evaluate", "report"):
        assert begun.job(stage)["JobState"] == "CANCELLED"
        assert begun.kinds(stage) == []
    status = begun.status()
    print(status)
    states = {line.split()[0]: line.split()[1] for line in status.splitlines()[2:12]}
    assert states["references_base"] == "done"
    assert states["no_replay"] == "failed"
    assert states["rod"] == states["report"] == "cancelled"
    (failure,) = begun.events("no_replay")[-1:]
    assert f"no_replay: failed: {failure['why']}" in status
    assert "rank" in failure["why"] and "log:" in failure["why"]
    assert "references_specialist: cancelled: no_replay did not end well" in status


def test_refused_chain_leaves_no_job_behind(cluster, tmp_path):
    options = [*RECIPE, *ON_SLURM, f"run_dir={tmp_path}"]
    options += ["cluster.cpu_partition=work", "cluster.partition=nowhere"]  # prepare is taken
    refusal = nemo_rod("run", *options, cluster=cluster, status=2)
    assert "Slurm refused the chain: " in refusal
    assert "invalid partition specified: nowhere" in refusal
    assert not (tmp_path / "launch" / "slurm" / "jobs.tsv").exists()
    cluster.wait(60)


def test_cancel_ends_the_chain_and_nothing_comes_back(begun):
    options = [*RECIPE, *ON_SLURM, f"run_dir={begun.run_dir}"]
    nemo_rod("run", *options, cluster=begun.cluster)
    begun.reach("no_replay", 1, 20)
    assert "cancelled" in nemo_rod("status", str(begun.run_dir), "--cancel", cluster=begun.cluster)
    begun.cluster.wait(120)
    assert begun.job("no_replay")["JobState"] == "CANCELLED"
    assert "no_replay  " in begun.status() and "done" not in row(begun.status(), "no_replay")
    # nothing is lost: it resumes where it was
    nemo_rod("train", *options, "arm=no_replay", cluster=begun.cluster)
    begun.reach("no_replay", 2, 21)
    nemo_rod("status", str(begun.run_dir), "--cancel", cluster=begun.cluster)
    begun.cluster.wait(120)


def test_jobs_share_the_text_and_one_joins_it(cluster, tmp_path):
    texts = write_texts(tmp_path / "texts", 900)
    recipe = recipe_of(texts, tmp_path / "my")
    nemo_rod("prepare", *recipe, f"run_dir={tmp_path}/here")
    expected = tree(tmp_path / "here" / "blocks")
    for count in (1, 2, 5):
        chain = Chain(cluster, tmp_path / str(count), {})
        words = [*recipe, *ON_SLURM, f"run_dir={chain.run_dir}", f"prepare.nodes={count}"]
        print(nemo_rod("prepare", *words, cluster=cluster))
        names = [f"prepare_{n + 1}_of_{count}" for n in range(count if count > 1 else 0)]
        assert {*chain.numbers} == {*names, "prepare"}
        if names:
            cluster.preempt(5)  # whatever runs goes back into the queue
        cluster.wait(500)
        print(chain.status())
        assert tree(chain.run_dir / "blocks") == expected
        assert all(chain.kinds(name)[-1] == "done" for name in (*names, "prepare"))


def test_a_job_that_fails_names_its_file(cluster, tmp_path):
    texts = write_texts(tmp_path / "texts")
    whole = (texts / "f5.jsonl").read_text()
    (texts / "f5.jsonl").write_text(whole + '{"text": \n')
    chain = Chain(cluster, tmp_path / "run", {})
    recipe = recipe_of(texts, tmp_path / "my")
    words = [*recipe, *ON_SLURM, f"run_dir={chain.run_dir}", "prepare.nodes=2"]
    nemo_rod("prepare", *words, cluster=cluster)
    cluster.wait(300)
    said = chain.status()
    assert "f5.jsonl" in said and "of 2: source old" in said
    assert not (chain.run_dir / "blocks").exists()
    (texts / "f5.jsonl").write_text(whole)
    print(nemo_rod("prepare", *words, cluster=cluster))
    cluster.wait(300)
    assert (chain.run_dir / "blocks" / "store.json").exists()
