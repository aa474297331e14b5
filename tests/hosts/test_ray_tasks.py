"""Text tokenised by tasks of a real Ray: the blocks are those of one process."""

import contextlib
import os
import shutil
import threading
from pathlib import Path

import psutil
import pytest
from command_line import composed
from corpus_cases import tree
from split_texts import sources_of, write_texts

from nemo_rod.config import Config, Domain
from nemo_rod.run.stages import Stages

pytestmark = pytest.mark.nemo_rl


@pytest.fixture(scope="module")
def ray_here():
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()
    shutil.rmtree(Path(os.environ["TMPDIR"]) / "ray")  # its logs


def recipe_of(texts: Path, *words: str) -> Config:
    config = composed("recipe=toy_synthetic", *words)
    config.domain = Domain(tokenizer="byte", block_size=64, sources=sources_of(texts))
    return config


def prepared(config: Config) -> dict[str, str]:
    for stage in Stages(config).all():
        if "prepare" in (stage.name, stage.feeds):
            stage.run()
    return tree(Path(config.run_dir) / "blocks")


def test_tasks_of_ray_share_the_text(ray_here, tmp_path):
    texts = write_texts(tmp_path / "texts", 900)
    expected = prepared(recipe_of(texts, f"run_dir={tmp_path}/one"))
    killed = 0
    for count in (1, 2, 5):
        words = [f"run_dir={tmp_path}/{count}", "launcher=nemo_rl", f"prepare.nodes={count}"]
        over = threading.Event()

        def kill_workers(over: threading.Event = over) -> None:
            """Ends a process that works on a task, now and then, as a node's failure does."""
            nonlocal killed
            while not over.wait(0.4) and killed < 12:
                for process in psutil.Process().children(recursive=True):
                    with contextlib.suppress(psutil.Error):
                        if "ray::rod_task" in " ".join(process.cmdline()):
                            process.kill()
                            killed += 1

        killer = threading.Thread(target=kill_workers)
        killer.start()
        try:
            made = prepared(recipe_of(texts, *words))
        finally:
            over.set()
            killer.join()
        assert made == expected
    print(f"{killed} kills")


def test_a_task_of_ray_names_its_file(ray_here, tmp_path):
    texts = write_texts(tmp_path / "texts")
    with (texts / "f5.jsonl").open("a") as file:
        file.write('{"text": \n')
    words = [f"run_dir={tmp_path}/run", "launcher=nemo_rl", "prepare.nodes=2"]
    with pytest.raises(ValueError, match=r"task \d of 2: source old: .*f5\.jsonl:\d+: not a line"):
        prepared(recipe_of(texts, *words))
