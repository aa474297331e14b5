"""Bytes that cross Ray in one step, as Ray serialises them: traffic.py JOB.json SECTION."""

import json
import sys
from pathlib import Path

import ray
from nemo_rl.distributed.virtual_cluster import init_ray

from nemo_rod.hosts.nemo_rl import settings
from nemo_rod.hosts.nemo_rl.policy import using_workers
from nemo_rod.jobs import read_job


def size_of(value) -> int:
    worker = ray._private.worker.global_worker
    return worker.get_serialization_context().serialize(value).total_bytes


class Meter:
    """Counts the bytes of a policy's calls to all of its workers."""

    def __init__(self, group) -> None:
        self.sent = self.received = 0
        call = group.run_all_workers_single_data

        def metered(method, **kwargs):
            futures = call(method, **kwargs)
            self.sent += size_of(kwargs) * len(group.workers)
            self.received += sum(size_of(ray.get(future)) for future in futures)
            return futures

        group.run_all_workers_single_data = metered


def main() -> None:
    init_ray()
    job = read_job(Path(sys.argv[1]))
    with using_workers(settings.resolve_job(job, json.loads(sys.argv[2])), job) as workers:
        meter = Meter(workers.policy.worker_group)
        choice, _ = workers.call("rod_step", step=0)
        moved = {"sent": meter.sent, "received": meter.received}
        print(json.dumps({"candidates": len(choice.pool.block_ids), **moved}))


if __name__ == "__main__":
    main()
