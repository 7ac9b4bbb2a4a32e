"""Shards on a Ray cluster of two nodes, one of which is killed."""

import json
import logging
import sys
import time
import warnings

import pytest
import soundfile
from explored import RATE, sound, sound_model

from transduce.cli.bulk import BulkFlags
from transduce.cli.shard_files import parse_shards
from transduce.model.checkpoint import save_model

pytest.importorskip("ray")
# Ray leaves files open.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


class Slow:
    """Work whose inputs are numbers; a chunk of two takes some time, and one number is bad."""

    chunk_size = 2

    def __init__(self, log):
        self.log = log

    def inputs(self):
        yield from range(40)

    def load(self):
        return "model"

    def lines(self, loaded, inputs, progress):
        import ray

        time.sleep(0.3)
        with open(self.log, "a") as log:
            node = ray.get_runtime_context().get_node_id() if ray.is_initialized() else "here"
            log.write(f"{node} {inputs[0]}\n")
        progress(len(inputs))
        return [
            json.dumps({"input": str(one)} | ({"error": "bad"} if one == 7 else {}))
            for one in inputs
        ]


@pytest.fixture
def cluster():
    """Start two nodes of one CPU each, and connect to them."""
    import ray
    from ray.cluster_utils import Cluster

    size = dict(num_cpus=1, object_store_memory=100_000_000)
    cluster = Cluster(initialize_head=True, head_node_args=size | {"include_dashboard": False})
    cluster.other = cluster.add_node(**size)
    # Workers import this file by its name.
    paths = {"PYTHONPATH": ":".join(path for path in sys.path if path)}
    ray.init(
        address=cluster.address,
        log_to_driver=False,
        logging_level=logging.ERROR,
        runtime_env={"env_vars": paths},
    )
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def run(work, shard, folder, engine="local", resume=False):
    with pytest.raises(SystemExit, match="1 of "):
        BulkFlags(shard, engine).run(work, work.load(), folder, False, resume)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_killed_node_loses_and_repeats_nothing(cluster, tmp_path, monkeypatch):
    run(Slow(tmp_path / "here.log"), "all/2", tmp_path / "local")
    module = sys.modules["transduce.cli.shard_files"]
    append, log = module.ShardFile.append, tmp_path / "ray.log"
    killed = []

    def kill_after_both_work(self, lines):
        append(self, lines)
        nodes = {line.split()[0] for line in log.read_text().splitlines()}
        if not killed and len(nodes) == 2:
            killed.append(len(log.read_text().splitlines()))
            cluster.remove_node(cluster.other, allow_graceful=False)

    monkeypatch.setattr(module.ShardFile, "append", kill_after_both_work)
    run(Slow(log), "all/2", tmp_path / "ray", "ray")
    assert killed and killed[0] < 20  # chunks that were done
    assert contents(tmp_path / "ray") == contents(tmp_path / "local")
    inputs = [json.loads(line)["input"] for line in (tmp_path / "ray/2-of-2.jsonl").open()]
    assert inputs == [str(number) for number in range(1, 40, 2)]


def test_sounds_have_the_same_bytes_as_in_shards_and_are_resumed(cluster, tmp_path, monkeypatch):
    from transduce.cli.transcribe import _Transcription
    from transduce.decoding.options import SearchOptions
    from transduce.model.model import load

    monkeypatch.chdir(tmp_path)
    save_model(sound_model(), tmp_path / "model")
    lines = []
    for number in range(9):
        soundfile.write(f"{number}.wav", sound(0.2 + 0.05 * number), RATE)
        lines.append(json.dumps({"audio_filepath": f"{number}.wav"}))
    (tmp_path / "list.jsonl").write_text("\n".join([*lines, "bad"]))
    model = load("model")
    options = SearchOptions(2, null_bias=-4.0)

    class InThrees(_Transcription):
        chunk_size = 3

    parts = ([tmp_path / "model"], "cpu", "32-true", options, model.signature)
    work = InThrees(*parts, [tmp_path / "list.jsonl"])
    for shard in parse_shards("all/2"):
        number = f"{shard.number}/{shard.count}"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if shard.number == 2:
                run(work, number, tmp_path / "local")
            else:
                BulkFlags(number).run(work, model, tmp_path / "local", False, False)
    run(work, "all/2", tmp_path / "ray", "ray")
    expected = contents(tmp_path / "local")
    assert contents(tmp_path / "ray") == expected and b"timings" in expected["1-of-2.jsonl"]
    first = tmp_path / "ray/1-of-2.jsonl"
    whole = first.read_bytes().splitlines(keepends=True)
    first.unlink()
    (tmp_path / "ray/1-of-2.jsonl.part").write_bytes(b"".join(whole[:3]) + whole[3][:5])
    run(work, "all/2", tmp_path / "ray", "ray", resume=True)
    assert contents(tmp_path / "ray") == expected
