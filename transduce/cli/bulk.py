"""Commands over whole corpora: --shard and --engine."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from cyclopts import Parameter

from transduce.cli.outputs import report_files
from transduce.cli.ray_engine import run_on_ray
from transduce.cli.shard_files import Shard, ShardFile, Work, chunks, parse_shards
from transduce.cli.terminal import progress_bar

Loaded = TypeVar("Loaded")


@Parameter(name="*")
@dataclass(frozen=True)
class BulkFlags:
    """The options of a command over a whole corpus."""

    shard: str | None = None
    """Compute one shard of all inputs, such as 3/16, or each of them, all/16. It writes a line of
    JSON for each input to a file in the folder of --output, such as 3-of-16.jsonl. An input that
    fails is a line with its error."""
    engine: Literal["local", "ray"] = "local"
    """What computes shards: this process, or a Ray cluster (extra `ray`)."""

    @property
    def on_ray(self) -> bool:
        return self.engine == "ray"

    def check(self, output: Path | None, others: Mapping[str, object]) -> None:
        """Raise ValueError unless the options go together; `others` exclude --shard."""
        if self.shard is None:
            if self.on_ray:
                raise ValueError("--engine goes with --shard; give both, such as --shard all/1")
            return
        if output is None:
            raise ValueError("--shard goes with --output; give a folder")
        for option, value in others.items():
            if value:
                raise ValueError(f"--shard writes JSON lines; leave out {option}")

    def run(
        self,
        work: Work[Loaded],
        loaded: Loaded,
        folder: Path,
        overwrite: bool,
        resume: bool,
        *,
        num_gpus: int,
    ) -> None:
        """Compute the shards, or with `resume` the rest of them; exit with 1 if an input failed."""
        assert self.shard is not None
        if overwrite and resume:
            raise ValueError("--overwrite and --resume exclude each other; give one of them")
        files = dict[Shard, ShardFile]()
        with ExitStack() as stack, progress_bar(f"shard {self.shard}", None) as advance:
            for shard in parse_shards(self.shard):
                files[shard] = ShardFile(folder, shard, work.chunk_size, overwrite, resume)
                stack.callback(files[shard].close)
            rest = {shard: file for shard, file in files.items() if not file.is_finished}
            if self.on_ray and rest:
                run_on_ray(work, rest, num_gpus, advance)
            else:
                done = {shard: file.num_lines for shard, file in rest.items()}
                for shard, inputs in chunks(work.inputs(), done, work.chunk_size):
                    rest[shard].append(work.lines(loaded, inputs, advance))
            for file in rest.values():
                file.finish()
        report_files(folder, len(rest), len(files) - len(rest))
        _report_failures(files)


def _report_failures(files: Mapping[Shard, ShardFile]) -> None:
    """Say what failed, with the first error; exit with 1 then."""
    failed = [file for file in files.values() if file.num_failed]
    if not failed:
        return
    number = sum(file.num_failed for file in failed)
    total = sum(file.num_lines for file in files.values())
    raise SystemExit(
        f"transduce: {number} of {total} inputs failed; the lines with error in {failed[0].path}"
        f"{' and others' if len(failed) > 1 else ''} say why; the first: {failed[0].first_error}"
    )
