"""A real Slurm on loopback: a controller and two nodes, started for a test and ended by it."""

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

PORTS = range(17000, 19000, 10)
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
# Each of the two nodes pretends to have one GPU, so that two processes take two nodes.
CONFIG = """
ClusterName=loopback
SlurmctldHost={host}({control})
SlurmctldPort={ctld}
AuthType=auth/munge
# a requeued job may start again once its credential has expired
AuthInfo=socket={root}/munge/socket,cred_expire=10
CredType=cred/munge
CryptoType=crypto/munge
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SchedulerParameters=sched_interval=2,bf_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=30
MinJobAge=3600
FirstJobId={job}
NodeName=n1 NodeHostname={host} NodeAddr={n1} Port={first} CPUs=16 RealMemory=64000 Gres=gpu:1
NodeName=n2 NodeHostname={host} NodeAddr={n2} Port={last} CPUs=16 RealMemory=64000 Gres=gpu:1
PartitionName=work Nodes=n[1-2] Default=YES MaxTime=1:00:00 PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=n[1-2] MaxTime=1:00:00 PriorityTier=9 PreemptMode=OFF
"""


BRIDGE = f"rod{os.getpid()}"[-10:]
NETWORK = """
ip link add {bridge} type bridge
ip link set {bridge} up && ip addr add 10.99.9.254/24 dev {bridge}
for n in 1 2; do
  ip netns add {bridge}-n$n && ip link add {bridge}$n type veth peer name fabric netns {bridge}-n$n
  ip link set {bridge}$n master {bridge} && ip link set {bridge}$n up
  ip -n {bridge}-n$n addr add 10.99.9.$n/24 dev fabric
  ip -n {bridge}-n$n link set fabric up && ip -n {bridge}-n$n link set lo up
done
"""


class Cluster:
    """A running Slurm; `environment` makes its programs speak to it.

    With `apart`, each node is in a network of its own, and has a name that resolves nowhere.
    """

    def __init__(self, root: Path, *, apart: bool = False) -> None:
        self.root, self.apart = root, apart
        self.config = root / "slurm.conf"
        self.environment = {**os.environ, "SLURM_CONF": str(self.config)}
        self._running: list[subprocess.Popen[bytes]] = []
        ports = free_ports(4)
        user = subprocess.run(["id", "-un"], capture_output=True, text=True).stdout.strip()
        for folder in ("munge", "state", "n1", "n2"):
            (root / folder).mkdir()
        (root / "gpu").touch()
        (root / "gres.conf").write_text(f"NodeName=n[1-2] Name=gpu File={root}/gpu\n")
        host = socket.gethostname().split(".")[0]
        # the two nodes' ports must follow each other
        first = ports[0]
        # jobs of another cluster on this machine have other numbers, and so other ports
        job = 1 + 100 * (first - PORTS.start)
        self.config.write_text(
            CONFIG.format(
                control="10.99.9.254" if apart else "127.0.0.1",
                n1="10.99.9.1" if apart else "127.0.0.1", n2="10.99.9.2" if apart else "127.0.0.1",
                root=root, host=host, user=user, ctld=ports[2], first=first, last=first + 1,
                job=job,
            )
        )  # fmt: skip

    def start(self) -> None:
        folder = self.root / "munge"
        (folder / "key").touch(mode=0o600)
        (folder / "key").write_bytes(os.urandom(1024))
        folder.chmod(0o755)
        files = [f"--{name}-file={folder / name}" for name in ("key", "pid", "log", "seed")]
        if self.apart:
            subprocess.run(["sh", "-ec", NETWORK.format(bridge=BRIDGE)], check=True)
        self._spawn("munged", "--foreground", "--force", f"--socket={folder / 'socket'}", *files)
        wait_for((folder / "socket").exists, 30, "munged did not start")
        self._spawn("slurmctld", "-D", "-c", "-f", str(self.config))
        for node in ("n1", "n2"):
            slurmd = ("slurmd", "-D", "-N", node, "-f", str(self.config))
            if not self.apart:
                self._spawn(*slurmd)
                continue
            named = f"hostname {node}.nowhere; exec {' '.join(slurmd)}"
            apart = f"--net=/run/netns/{BRIDGE}-{node} unshare -u sh -c".split()
            self._spawn("nsenter", *apart, named)
        wait_for(
            lambda: self.ask("sinfo", "-h", "-o", "%D %t").startswith("2 idle"), 60, "no nodes"
        )

    def stop(self) -> None:
        with contextlib.suppress(subprocess.CalledProcessError):
            self.ask("scancel", "--me")
            self.wait(60)
        for process in reversed(self._running):
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            if process.poll() is None:
                process.kill()
        if self.apart:
            away = f"ip link del {BRIDGE}; ip netns del {BRIDGE}-n1; ip netns del {BRIDGE}-n2"
            subprocess.run(["sh", "-c", away], check=True)

    def ask(self, *command: str) -> str:
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, check=True, timeout=60
        )
        return done.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """What the controller knows of a job."""
        text = self.ask("scontrol", "show", "job", "--oneliner", number)
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def is_queued(self, *numbers: str) -> bool:
        """Whether any of these jobs, or any job at all, is pending or running."""
        options = ["-j", ",".join(numbers)] if numbers else []
        return bool(self.ask("squeue", "-h", *options))

    def wait(self, seconds: float, *numbers: str) -> None:
        """Waits for the end of these jobs, or of all."""
        wait_for(lambda: not self.is_queued(*numbers), seconds, "the jobs did not end")

    def preempt(self, seconds: int) -> None:
        """A job of a higher partition takes both nodes for some time."""
        urgent = ("--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null")
        self.ask("sbatch", *urgent, f"--wrap=sleep {seconds}")

    def _spawn(self, program: str, *arguments: str) -> None:
        path = path_of(program)
        assert path is not None
        with open(self.root / f"{program}.out", "ab") as out:
            process = subprocess.Popen(
                [path, *arguments], env=self.environment, stdout=out, stderr=subprocess.STDOUT
            )
        self._running.append(process)


@contextlib.contextmanager
def slurm_cluster(root: Path, *, apart: bool = False) -> Iterator[Cluster]:
    cluster = Cluster(root, apart=apart)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def path_of(program: str) -> str | None:
    return shutil.which(program) or shutil.which(program, path="/usr/sbin:/sbin")


def processes_of(*jobs: str) -> list[dict[str, Any]]:
    """Number, name and words of every process that Slurm's variables say is of one of the jobs."""
    processes = [p.info for p in psutil.process_iter(["pid", "name", "cmdline", "environ"])]
    return [facts for facts in processes if (facts["environ"] or {}).get("SLURM_JOB_ID") in jobs]


def free_ports(count: int) -> list[int]:
    """Ports in a row that nobody listens on."""
    for start in PORTS:
        ports = range(start, start + count)
        try:
            with contextlib.ExitStack() as stack:
                for port in ports:
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return list(ports)
        except OSError:
            continue
    raise RuntimeError("no free ports")


def wait_for(
    condition: Callable[[], bool], seconds: float, what: str, *, every: float = 0.5
) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(every)
