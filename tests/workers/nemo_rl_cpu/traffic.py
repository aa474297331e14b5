"""Bytes that cross Ray in one step, as Ray serialises them: `traffic.py RECIPE [key=value]`."""

import json
import sys

import ray

from nemo_rod.hosts.nemo_rl import algorithm
from nemo_rod.hosts.nemo_rl import settings as config
from nemo_rod.hosts.nemo_rl.cluster import start_ray


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
    start_ray()
    run = algorithm.setup(config.load(sys.argv[1], sys.argv[2:]))
    meter = Meter(run.policy.worker_group)
    choice, _ = run.workers.step(0)
    print(
        json.dumps(
            {
                "candidates": len(choice.pool.block_ids),
                "sent": meter.sent,
                "received": meter.received,
            }
        )
    )
    run.close()


if __name__ == "__main__":
    main()
