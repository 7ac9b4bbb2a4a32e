"""Shards computed by Ray Data, on as many machines as its cluster has.

One task reads the inputs, and actors that hold the model compute chunks of them. Results come back
in the order of the inputs and are written here, so that the death of an actor or a machine, whose
chunks Ray computes again, neither loses nor repeats a line.
"""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from transduce.cli.shard_files import Shard, ShardFile, Work, chunks


def run_on_ray(
    work: Work[Any],
    files: Mapping[Shard, ShardFile],
    num_gpus: int,
    advance: Callable[[float], object],
) -> None:
    """Compute the rest of each shard on the cluster of `ray start` or RAY_ADDRESS, or a local one.

    Every CPU has an actor, or every GPU if an actor takes `num_gpus`.
    """
    try:
        import ray
        import ray.data
    except ImportError:
        raise ValueError(
            'Ray is not installed; run pip install "transduce[ray]", or leave out --engine'
        ) from None

    if not ray.is_initialized():
        ray.init(log_to_driver=False, logging_level=logging.WARNING)
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    context = ray.data.DataContext.get_current().copy()
    context.target_max_block_size = 1  # byte: every chunk is a block, and goes to any actor
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False
    resource = "GPU" if num_gpus else "CPU"
    most = max(1, int(ray.cluster_resources().get(resource, 1)))
    done = {shard: file.num_lines for shard, file in files.items()}
    with ray.data.DataContext.current(context):
        results = (
            ray.data.from_items([{"part": 0}])
            .map_batches(_read, fn_args=(work, done, os.getcwd()), batch_size=None, num_cpus=0)
            .map_batches(
                _Actor,
                fn_constructor_args=(work, os.getcwd()),
                batch_size=1,
                compute=ray.data.ActorPoolStrategy(min_size=1, max_size=most),
                num_cpus=1,
                num_gpus=num_gpus or None,
            )
        )
    for row in results.iter_rows():
        lines = pickle.loads(row["lines"])
        files[Shard(*map(int, row["shard"]))].append(lines)
        advance(len(lines))


def _read(
    _: object, work: Work[Any], done: Mapping[Shard, int], folder: str
) -> Iterator[dict[str, Any]]:
    """Yield chunks of inputs, pickled, each in a batch of its own; paths are relative to folder."""
    os.chdir(folder)
    for shard, inputs in chunks(work.inputs(), done, work.chunk_size):
        yield {"shard": [[shard.number, shard.count]], "inputs": [pickle.dumps(inputs)]}


class _Actor:
    """A worker that holds the model."""

    def __init__(self, work: Work[Any], folder: str) -> None:
        os.chdir(folder)
        self.work, self.loaded = work, work.load()

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Compute the lines of the chunks of a batch."""
        found = [
            self.work.lines(self.loaded, pickle.loads(inputs), lambda share: None)
            for inputs in batch["inputs"]
        ]
        return {"shard": batch["shard"], "lines": [pickle.dumps(lines) for lines in found]}
