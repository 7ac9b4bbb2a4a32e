"""Two machines for the tests: network namespaces where the system allows them, else addresses."""

import ctypes
import multiprocessing
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).parent.parent

VARIABLES = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
# A process that has imported all that training needs, and is forked into others in no time.
FORKED = multiprocessing.get_context("forkserver")


def run_planned(arguments, plan, namespace, environment, outputs):
    """Run `transduce` in this process, which was forked, with a plan.

    {"kill_at": 20} ends the process by SIGKILL after that step, {"note_after": 0.5} sets the time
    before the note that it waits for others, {"keep_alive": {...}} the times after which a machine
    that does not answer is lost; {"arguments": [...]} adds options.
    """
    os.setsid()
    if namespace:
        enter(namespace)
    for number, path in outputs.items():
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    os.environ |= environment

    from transduce.cli import main
    from transduce.training import launch, peers
    from transduce.training.progress import Progress

    step, steps = Progress.step, []

    def step_or_die(self, *arguments):
        steps.append(0)
        if len(steps) == plan.get("kill_at"):
            print("killed at", time.time(), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        step(self, *arguments)

    Progress.step = step_or_die
    sys.argv = ["transduce", *arguments, *plan.get("arguments", [])]
    launch.SECONDS_BEFORE_NOTE = plan.get("note_after", 60.0)
    peers.KEEP_ALIVE |= plan.get("keep_alive", {})
    main()


def enter(namespace):
    """Move this process into a network namespace, as `ip netns exec` does."""
    with open(f"/run/netns/{namespace}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")


@dataclass(frozen=True)
class Forked:
    """A forked process that writes into files, with the methods of `subprocess.Popen`."""

    process: multiprocessing.Process
    outputs: dict[int, str]  # the files of standard output and of standard error

    @property
    def pid(self):
        return self.process.pid

    @property
    def returncode(self):
        return self.process.exitcode

    def poll(self):
        return self.process.exitcode

    def communicate(self, timeout=None):
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired("transduce", timeout)
        return tuple(Path(path).read_text() for path in self.outputs.values())


@dataclass(frozen=True)
class Machine:
    """A machine: its address, its interface, and the command that runs others there."""

    address: str
    interface: str
    namespace: str = ""

    @property
    def prefix(self):
        """Return the command that runs others on the machine."""
        return ("ip", "netns", "exec", self.namespace) if self.namespace else ()

    def start(self, command):
        """Start a command on the machine."""
        return subprocess.Popen(
            [*self.prefix, *map(str, command)],
            env=os.environ | VARIABLES | {"GLOO_SOCKET_IFNAME": self.interface},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def fork(self, arguments, plan, environment, folder):
        """Start `transduce` on the machine, in a fork of a process that has imported it.

        It writes what it prints into files of the folder.
        """
        environment = {name: str(value) for name, value in environment.items()}
        environment |= VARIABLES | {"GLOO_SOCKET_IFNAME": self.interface}
        outputs = {}
        for number in (1, 2):
            descriptor, outputs[number] = tempfile.mkstemp(dir=folder)
            os.close(descriptor)
        arguments = ([str(argument) for argument in arguments], plan, self.namespace)
        process = FORKED.Process(target=run_planned, args=(*arguments, environment, outputs))
        process.start()
        return Forked(process, outputs)


class TwoMachines:
    """Two machines that are connected; `with` removes them."""

    def __enter__(self):
        self.namespaces, name = [], f"transduce-{secrets.token_hex(3)}"
        if not self._add_namespaces(name):
            self.machines = [Machine(f"127.0.0.{i}", "lo") for i in (2, 3)]
        self.folder = tempfile.TemporaryDirectory()
        FORKED.set_forkserver_preload(["transduce.cli", "transduce.training.fit"])
        with mock.patch.dict(os.environ, VARIABLES):
            forkserver.ensure_running()
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
            self._delete_namespaces()
            self.namespaces = []
            return False
        self.machines = [
            Machine(f"10.213.7.{i + 1}", ends[i], space) for i, space in enumerate((a, b))
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
            time.sleep(delays[rank])
            started.append(
                machine.fork(arguments, plans.get(rank, {}), slurm | meet, self.folder.name)
            )
        return started

    def __exit__(self, *_):
        self.folder.cleanup()
        self._delete_namespaces()

    def _delete_namespaces(self):
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
