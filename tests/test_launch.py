"""The processes of a training as launchers describe them in environment variables."""

import json
import socket
from types import SimpleNamespace

import pytest

from transduce.data.pairs import DataError
from transduce.training import checks, launch, peers
from transduce.training.checks import TrainingError
from transduce.training.launch import launcher, settle_processes, start_fabric
from transduce.training.recipe import TrainConfig

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "1",
    "WORLD_SIZE": "8",
    "GROUP_WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "4",
    "LOCAL_RANK": "0",
}
SRUN = {"SLURM_NTASKS": "8", "SLURM_NNODES": "2", "SLURM_LOCALID": "0"}


@pytest.mark.parametrize("environment", [TORCHRUN, SRUN, SRUN | TORCHRUN])
def test_a_launcher_decides_the_numbers_of_devices_and_machines(environment):
    for config in (TrainConfig(), TrainConfig(devices=4), TrainConfig(devices=4, machines=2)):
        settled = settle_processes(config, environment)
        assert (settled.devices, settled.machines) == (4, 2)


def test_without_a_launcher_the_recipe_decides():
    settled = settle_processes(TrainConfig(), {})
    assert (settled.devices, settled.machines) == (1, 1)
    assert settle_processes(TrainConfig(devices=3), {}).devices == 3
    by_hand = {"MASTER_ADDR": "10.0.0.1", "NODE_RANK": "1"}
    assert settle_processes(TrainConfig(machines=2), by_hand).machines == 2
    shell = SRUN | {"SLURM_JOB_NAME": "interactive"}
    assert settle_processes(TrainConfig(), shell).devices == 1


@pytest.mark.parametrize(
    "config, environment, said",
    [
        (
            TrainConfig(devices=2),
            TORCHRUN,
            "train.devices is 2, but torchrun has --nproc-per-node 4; set train.devices to 4, or "
            "give torchrun --nproc-per-node 2",
        ),
        (
            TrainConfig(machines=3),
            TORCHRUN,
            "train.machines is 3, but torchrun has --nnodes 2; set train.machines to 2, or give "
            "torchrun --nnodes 3",
        ),
        (
            TrainConfig(devices=1),
            SRUN,
            "train.devices is 1, but srun has --ntasks-per-node 4; set train.devices to 4, or "
            "give srun --ntasks-per-node 1",
        ),
        (
            TrainConfig(),
            SRUN | {"SLURM_NTASKS": "7"},
            "srun started 7 processes on 2 machines, which cannot be the same number on each; "
            "give srun --ntasks-per-node",
        ),
        (
            TrainConfig(),
            SRUN | {"SLURM_NNODES": "two"},
            "the environment variable SLURM_NNODES is 'two', not a number; start the training "
            "with torchrun or srun, which set it",
        ),
        (
            TrainConfig(machines=2),
            {},
            "train.machines is 2, but no launcher started this process; start the same command on "
            "all of them with torchrun --nnodes 2, or with srun",
        ),
    ],
)
def test_a_contradiction_is_one_sentence(config, environment, said):
    with pytest.raises(TrainingError) as error:
        settle_processes(config, environment)
    assert str(error.value) == said


def test_one_process_of_a_machine_says_the_sentence(monkeypatch):
    monkeypatch.setattr(checks, "SECONDS_TO_SPEAK", 0.0)
    with pytest.raises(SystemExit) as error:
        settle_processes(TrainConfig(devices=2), TORCHRUN | {"LOCAL_RANK": "3"})
    assert error.value.code == 1


def test_lightning_finds_the_same_launcher(monkeypatch):
    """Ours reads the variables before there is a Fabric, and must not contradict it."""
    from lightning_fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment

    for environment, theirs in ((TORCHRUN, TorchElasticEnvironment), (SRUN, SLURMEnvironment)):
        with monkeypatch.context() as patched:
            for name, value in environment.items():
                patched.setenv(name, value)
            assert theirs.detect() and launcher(environment) is not None
        assert not theirs.detect()


@pytest.mark.parametrize(
    "precision, lightnings", [("bf16-mixed", "bf16-mixed"), ("tf32", "32-true")]
)
def test_lightning_computes_in_bfloat16_only_if_asked(precision, lightnings):
    config = TrainConfig(precision=precision, device="cpu", devices=1, machines=1)
    assert start_fabric(config)._precision.precision == lightnings


def test_a_process_that_waits_says_so(monkeypatch, capsys):
    monkeypatch.setattr(launch, "SECONDS_BEFORE_NOTE", 0.05)
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with launch._note_if_slow("waiting", shown=True):
        launch.threading.Event().wait(0.5)
    assert capsys.readouterr().err == "transduce: waiting at 10.0.0.1:29500\n"
    with launch._note_if_slow("waiting", shown=False):
        launch.threading.Event().wait(0.2)
    assert capsys.readouterr().err == ""


def test_processes_that_do_not_connect_are_named(monkeypatch):
    monkeypatch.setattr(peers, "SECONDS_TO_CONNECT", 0.05)
    monkeypatch.setenv("MASTER_ADDR", "first")
    fabric = SimpleNamespace(is_global_zero=True, world_size=3, broadcast=lambda told: told)
    with pytest.raises(TrainingError, match=r"processes \[1, 2\] cannot reach process 0 at first"):
        peers._connect(fabric, peers.End(0, 0, 0, "first"))


@pytest.mark.parametrize("local_rank, raised", [(0, DataError), (1, SystemExit)])
def test_an_error_of_all_processes_is_said_once_on_each_machine(monkeypatch, local_rank, raised):
    monkeypatch.setattr(checks, "SECONDS_TO_SPEAK", 0.0)
    ours, theirs = socket.socketpair()
    first = peers.End(0, 0, 0, "first")
    monkeypatch.setattr(peers, "_connect", lambda *_: {ours: first})
    fabric = SimpleNamespace(global_rank=2, node_rank=1, local_rank=local_rank, world_size=4)
    with theirs:
        with pytest.raises(raised), peers.watch_peers(fabric):
            raise DataError("there is no such file")
        told = json.loads(theirs.recv(1000))
    assert (told["rank"], told["error"]) == (2, "there is no such file")


@pytest.mark.parametrize(
    "end, speaker",
    [
        (peers.End(3, 1, 1, "here"), 0),  # it was lost
        (peers.End(2, 1, 0, "here"), 1),
        (peers.End(2, 1, 0, "here", "no file"), None),  # it has said so itself
        (peers.End(3, 1, 1, "here", "no file"), 0),
        (peers.End(0, 0, 0, "there", "no file"), 0),
    ],
)
def test_one_process_of_a_machine_tells_of_an_end(end, speaker):
    others = [rank for rank in range(3) if (1, rank) != (end.machine, end.local_rank)]
    tellers = []
    for local_rank in others:
        peer = peers._Peers(peers.End(2 + local_rank, 1, local_rank, "here"), {})
        peer.end = end
        if peer.says_it():
            tellers.append(local_rank)
        peer.close()
    assert tellers == ([] if speaker is None else [speaker])
