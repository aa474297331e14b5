"""Bytes that cross Ray in one step, as Ray serialises them: `traffic.py RECIPE [key=value]`."""

import json
import sys

import ray
from nemo_rl.distributed.virtual_cluster import init_ray

from nemo_rod.hosts.nemo_rl import settings
from nemo_rod.hosts.nemo_rl.inputs import build_arm, open_store
from nemo_rod.hosts.nemo_rl.policy import started


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
    config = settings.load(sys.argv[1], sys.argv[2:])
    with started(config, build_arm(config, open_store(config))) as workers:
        meter = Meter(workers.policy.worker_group)
        choice, _ = workers.call("rod_step", step=0)
        moved = {"sent": meter.sent, "received": meter.received}
        print(json.dumps({"candidates": len(choice.pool.block_ids), **moved}))


if __name__ == "__main__":
    main()
