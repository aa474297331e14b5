"""Text tokenised by several jobs of a real Slurm, and joined by another: the blocks of one job."""

import pytest
from corpus_cases import tree
from slurm_chain import ON_SLURM, Chain, nemo_rod
from split_texts import recipe_of, write_texts

pytestmark = pytest.mark.slurm


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
