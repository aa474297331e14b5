"""Bytes that cross Ray in one step, as Ray serialises them: `traffic.py RECIPE [key=value]`."""

from __future__ import annotations

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
    """Counts what goes through the two ways in which a policy calls its workers."""

    def __init__(self, group) -> None:
        self.sent = self.received = 0
        self._group = group
        for name in ("run_all_workers_single_data", "run_all_workers_sharded_data"):
            setattr(group, name, self._metered(getattr(group, name)))

    def _metered(self, call):
        def metered(method, *args, data=None, **kwargs):
            shards = {} if data is None else {"data": data}
            futures = call(method, *args, **shards, **kwargs)
            workers = len(self._group.workers)
            self.sent += sum(map(size_of, data)) if data is not None else 0
            self.sent += size_of(kwargs) * workers
            refs = futures if isinstance(futures, list) else futures.futures
            self.received += sum(size_of(ray.get(ref)) for ref in refs)
            return futures

        return metered


def main() -> None:
    start_ray()
    run = algorithm.setup(config.load(sys.argv[1], sys.argv[2:]))
    meter = Meter(run.policy.worker_group)
    choice, _ = run.learner.step(0)
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
