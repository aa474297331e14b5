"""What Megatron starts to write checkpoints ends with its rank, even if that is killed."""

import subprocess
import sys
import time

import psutil
import pytest

PROGRAM = """
import os, signal
import nemo_rod.megatron
from nemo_rod.hosts.save_helpers import end_with_rank
from megatron.core.dist_checkpointing.strategies import async_utils, filesystem_async
import psutil

if __name__ == "__main__":
    end_with_rank()
    make = getattr(filesystem_async, "get_write_results_queue", None)
    results = (make or filesystem_async._get_write_results_queue)()
    results.put(1)
    assert results.get() == 1
    async_utils.PersistentAsyncCaller._get_process(0)
    helpers = psutil.Process().children()
    print(*(helper.pid for helper in helpers if "resource_tracker" not in str(helper.cmdline())))
    os.sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_helpers_end_with_a_killed_rank(tmp_path):
    program = tmp_path / "rank.py"
    program.write_text(PROGRAM)
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=250)
    queue, writer = map(int, done.stdout.split())
    end = time.monotonic() + 20
    while time.monotonic() < end and (psutil.pid_exists(queue) or psutil.pid_exists(writer)):
        time.sleep(0.1)
    assert not psutil.pid_exists(queue) and not psutil.pid_exists(writer)
