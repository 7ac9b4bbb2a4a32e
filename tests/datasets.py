"""Write the same four sounds in every format that can be read."""

import gzip
import io
import json
import tarfile

import numpy as np
import soundfile

NAMES = ["a", "b", "c", "d"]
TEXTS = ["ab a", "ba", "aab", "b b"]
RATE = 16_000


def samples(place):
    draw = np.random.default_rng(place)
    return (0.3 * draw.standard_normal(RATE // 2 + 800 * place)).astype(np.float32)


def encoded(place, format="FLAC", rate=RATE):
    content = io.BytesIO()
    soundfile.write(content, samples(place), rate, format=format)
    return content.getvalue()


def write_sounds(folder, suffix="flac"):
    folder.mkdir(parents=True, exist_ok=True)
    for place, name in enumerate(NAMES):
        (folder / f"{name}.{suffix}").write_bytes(encoded(place, suffix.upper()))


def write_manifest(folder):
    write_sounds(folder / "sounds")
    lines = [
        json.dumps({"audio_filepath": f"sounds/{name}.flac", "text": text})
        for name, text in zip(NAMES, TEXTS, strict=True)
    ]
    (folder / "all.jsonl").write_text("\n".join(lines) + "\n")
    return folder / "all.jsonl"


def write_kaldi(folder):
    write_sounds(folder / "sounds")
    waves = [f"{name} sounds/{name}.flac" for name in NAMES]
    texts = [f"{name} {text}" for name, text in zip(NAMES, TEXTS, strict=True)]
    (folder / "kaldi").mkdir()
    # Kaldi's paths are those from the folder in which its scripts run.
    (folder / "kaldi" / "wav.scp").write_text(
        "".join(f"{line.replace('sounds', str(folder / 'sounds'))}\n" for line in waves)
    )
    (folder / "kaldi" / "text").write_text("".join(f"{line}\n" for line in texts))
    (folder / "kaldi" / "utt2spk").write_text("".join(f"{name} {name}\n" for name in NAMES))
    return folder / "kaldi"


def write_segments(folder):
    """Write a Kaldi directory whose four utterances are segments of one recording."""
    path = write_kaldi(folder)
    pause = np.zeros(RATE, np.float32)
    pieces, lines, start = [], [], 0
    for place, name in enumerate(NAMES):
        pieces += [pause, soundfile.read(io.BytesIO(encoded(place)), dtype="float32")[0]]
        start += len(pause)
        end = start + len(pieces[-1])
        lines.append(f"{name} all {start / RATE} {end / RATE}\n")
        start = end
    soundfile.write(folder / "sounds" / "all.flac", np.concatenate(pieces), RATE)
    (path / "wav.scp").write_text(f"all {folder / 'sounds' / 'all.flac'}\n")
    (path / "segments").write_text("".join(lines))
    return path


def cut(place, folder, **changes):
    duration = len(samples(place)) / RATE
    recording = {
        "id": NAMES[place],
        "sources": [
            {"type": "file", "channels": [0], "source": str(folder / f"{NAMES[place]}.flac")}
        ],
        "sampling_rate": RATE,
        "num_samples": len(samples(place)),
        "duration": duration,
        "channel_ids": [0],
    }
    supervision = {"id": "s", "recording_id": NAMES[place], "start": 0.0, "duration": duration}
    supervision |= {"channel": 0, "text": TEXTS[place], "custom": {"phones": ["x", "y"]}}
    return {
        "id": NAMES[place],
        "start": 0,
        "duration": duration,
        "channel": 0,
        "supervisions": [supervision],
        "recording": recording,
        "type": "MonoCut",
    } | changes


def write_lhotse(folder):
    write_sounds(folder / "sounds")
    lines = [json.dumps(cut(place, folder / "sounds")) for place in range(len(NAMES))]
    with gzip.open(folder / "cuts.jsonl.gz", "wt") as file:
        file.write("\n".join(lines) + "\n")
    return folder / "cuts.jsonl.gz"


def write_common_voice(folder):
    write_sounds(folder / "clips")
    header = "client_id\tpath\tsentence_id\tsentence\tup_votes\n"
    lines = [f"x\t{n}.flac\t1\t{t}\t2\n" for n, t in zip(NAMES, TEXTS, strict=True)]
    (folder / "train.tsv").write_text(header + "".join(lines))
    return folder / "train.tsv"


def parquet_table(rows, text="text"):
    import pyarrow

    sound = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    return pyarrow.table(
        {
            "id": pyarrow.array(range(len(rows))),
            "audio": pyarrow.array([row[0] for row in rows], sound),
            text: pyarrow.array([row[1] for row in rows], pyarrow.string()),
        }
    )


def parquet_rows():
    return [
        ({"bytes": encoded(place), "path": f"{name}.flac"}, text)
        for place, (name, text) in enumerate(zip(NAMES, TEXTS, strict=True))
    ]


def write_parquet(folder):
    """Write a folder of two files, the first with two row groups."""
    from pyarrow import parquet

    (folder / "data").mkdir(parents=True)
    rows = parquet_rows()
    for number, part in enumerate((rows[:3], rows[3:])):
        path = folder / "data" / f"train-{number:05d}-of-00002.parquet"
        parquet.write_table(parquet_table(part), path, row_group_size=2)
    return folder / "data"


def write_tar(path, members):
    with tarfile.open(path, "w") as file:
        for name, content in members:
            header = tarfile.TarInfo(name)
            header.size = len(content)
            file.addfile(header, io.BytesIO(content))
    return path


def write_shards(folder):
    """Write a folder of two archives: texts in .txt, and in .json."""
    (folder / "shards").mkdir(parents=True)
    first = [
        member
        for place in (0, 1)
        for member in (
            (f"{NAMES[place]}.flac", encoded(place)),
            (f"{NAMES[place]}.txt", TEXTS[place].encode()),
        )
    ]
    second = [
        member
        for place in (2, 3)
        for member in (
            (f"{NAMES[place]}.json", json.dumps({"text": TEXTS[place]}).encode()),
            (f"{NAMES[place]}.flac", encoded(place)),
        )
    ]
    write_tar(folder / "shards" / "0.tar", first)
    write_tar(folder / "shards" / "1.tar", second)
    return folder / "shards"


WRITERS = {
    "manifest": write_manifest,
    "kaldi": write_kaldi,
    "segments": write_segments,
    "lhotse": write_lhotse,
    "common-voice": write_common_voice,
    "parquet": write_parquet,
    "shards": write_shards,
}
