"""Two machines for the tests: network namespaces where the system allows them, else addresses."""

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent

# `transduce` with a plan: {"kill_at": 20} ends the process by SIGKILL after that step,
# {"note_after": 0.5} sets the time before the note that it waits for others, {"keep_alive": {...}}
# the times after which a machine that does not answer is lost; {"arguments": [...]} adds options.
COMMAND = """
import json, os, signal, sys, time
from transduce.training import launch, peers
from transduce.training.progress import Progress

plan = json.loads(os.environ["PLAN"])
step, steps = Progress.step, []

def step_or_die(self, *arguments):
    steps.append(0)
    if len(steps) == plan.get("kill_at"):
        print("killed at", time.time(), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    step(self, *arguments)

Progress.step = step_or_die
sys.argv += plan.get("arguments", [])
launch.SECONDS_BEFORE_NOTE = plan.get("note_after", 60.0)
peers.KEEP_ALIVE |= plan.get("keep_alive", {})
from transduce.cli import main
main()
"""


@dataclass(frozen=True)
class Machine:
    """A machine: its address, its interface, and the command that runs others there."""

    address: str
    interface: str
    prefix: tuple[str, ...] = ()

    def start(self, command, **environment):
        """Start a command on the machine."""
        variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        variables |= {"GLOO_SOCKET_IFNAME": self.interface, "OMP_WAIT_POLICY": "passive"}
        return subprocess.Popen(
            [*self.prefix, *map(str, command)],
            env=os.environ | variables | {k: str(v) for k, v in environment.items()},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )


class TwoMachines:
    """Two machines that are connected; `with` removes them."""

    def __enter__(self):
        self.namespaces, name = [], f"transduce-{secrets.token_hex(3)}"
        if not self._add_namespaces(name):
            self.machines = [Machine(f"127.0.0.{i}", "lo") for i in (2, 3)]
        return self

    def _add_namespaces(self, name):
        """Connect two network namespaces with a cable; return whether the system allows it."""
        a, b = f"{name}-a", f"{name}-b"
        ends = [f"v{name[-6:]}{i}" for i in range(2)]
        commands = [f"netns add {a}", f"netns add {b}"]
        commands += [f"link add {ends[0]} netns {a} type veth peer name {ends[1]} netns {b}"]
        for i, space in enumerate((a, b)):
            commands += [f"-n {space} address add 10.213.7.{i + 1}/24 dev {ends[i]}"]
            commands += [f"-n {space} link set {link} up" for link in (ends[i], "lo")]
        self.namespaces = [a, b]
        try:
            for command in commands:
                subprocess.run(["ip", *command.split()], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            self.__exit__()
            self.namespaces = []
            return False
        self.machines = [
            Machine(f"10.213.7.{i + 1}", ends[i], ("ip", "netns", "exec", space))
            for i, space in enumerate((a, b))
        ]
        return True

    def cut(self):
        """Send all packets to the second machine to hardware that is not there."""
        self._neighbour("replace", "lladdr", "02:00:00:00:00:99", "nud", "permanent")

    def mend(self):
        """Undo `cut`."""
        self._neighbour("del")

    def _neighbour(self, verb, *options):
        """Change the first machine's knowledge of the second one's hardware."""
        first, second = self.machines
        command = ["ip", "neigh", verb, second.address, "dev", first.interface, *options]
        subprocess.run([*first.prefix, *command], check=True, capture_output=True)

    def srun(self, arguments, plans=None, delays=(0.0, 0.0)):
        """Start a process on each machine as srun does; return the two."""
        plans, port, started = plans or {}, free_port(), []
        for rank, machine in enumerate(self.machines):
            slurm = {"SLURM_NTASKS": 2, "SLURM_NNODES": 2, "SLURM_JOB_ID": 1, "SLURM_LOCALID": 0}
            slurm |= {"SLURM_PROCID": rank, "SLURM_NODEID": rank}
            meet = {"MASTER_ADDR": self.machines[0].address, "MASTER_PORT": port}
            plan = {"PLAN": json.dumps(plans.get(rank, {}))}
            time.sleep(delays[rank])
            command = [sys.executable, "-c", COMMAND, *arguments]
            started.append(machine.start(command, **slurm, **meet, **plan))
        return started

    def __exit__(self, *_):
        for space in self.namespaces:
            subprocess.run(["ip", "netns", "delete", space], capture_output=True)


def free_port():
    """Return a port that nothing listens at."""
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def finished(processes, timeout=120.0):
    """Wait for processes; return (exit code, standard output, standard error) of each."""
    results, deadline = [], time.monotonic() + timeout
    try:
        for process in processes:
            output = process.communicate(timeout=max(deadline - time.monotonic(), 0.1))
            results.append((process.returncode, *output))
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
    return results
