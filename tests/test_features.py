"""Features: parity with Kaldi, ragged batches, statistics, the cache, bad sound files."""

import errno
import io
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from torch.testing import assert_close

from transduce.audio.cache import FrameReader, read_features
from transduce.audio.features import SPECTROGRAM, Features, FeatureSettings, Statistics, deltas
from transduce.audio.sound import UnreadableSound, decode, encode_wav, read_wave
from transduce.data.manifest import read_manifest
from transduce.data.pairs import Audio, DataError, Frames, Notation, Origin, Pair

ROOT = Path(__file__).parent.parent
PHONES = Notation("spaces", "NFC")
SHERPA_WINDOWS = {"sherpa": ("povey", -400), "sherpa_streaming": ("hann", 8000)}
SHERPA = [FeatureSettings(kind=kind, num_channels=80, num_deltas=0) for kind in SHERPA_WINDOWS]


def noise(num_samples, seed=0):
    """Return samples in [-1, 1] of noise with varying loudness and spectrum."""
    generator = torch.Generator().manual_seed(seed)
    white = torch.randn(num_samples, generator=generator)
    loudness = 0.1 + 0.09 * torch.sin(torch.arange(num_samples) / 3000)
    return (white.cumsum(0) * 0.01 + white * 0.3) * loudness * 0.5


@pytest.fixture
def sounds(corpora):
    """Read eight real recordings."""
    pairs = read_manifest(corpora / "librispeech-10s" / "dev.jsonl", PHONES, "phones")[:8]
    return [read_wave(pair.source, 16_000, pair.origin) for pair in pairs]


def kaldi(wave, settings):
    """Compute the frames by kaldi-native-fbank with the same options."""
    knf = pytest.importorskip("kaldi_native_fbank")
    cepstra = settings.kind == "cepstra"
    options = knf.MfccOptions() if cepstra else knf.FbankOptions()
    options.frame_opts.samp_freq = settings.sample_rate
    options.frame_opts.dither = 0
    options.mel_opts.num_bins = settings.num_channels
    options.mel_opts.low_freq = 0
    if settings.kind in SHERPA_WINDOWS:  # as sherpa-onnx sets them for NeMo's transducers
        options.frame_opts.window_type, options.mel_opts.high_freq = SHERPA_WINDOWS[settings.kind]
        options.frame_opts.snip_edges = False
        options.frame_opts.remove_dc_offset = False
        options.mel_opts.is_librosa = True
    else:
        options.frame_opts.window_type = "hamming"
        wave = wave * 32768
    if cepstra:
        options.num_ceps = 1 + settings.num_cepstra
        options.cepstral_lifter = settings.lifter
    computer = knf.OnlineMfcc(options) if cepstra else knf.OnlineFbank(options)
    computer.accept_waveform(settings.sample_rate, wave.tolist())
    computer.input_finished()
    frames = [computer.get_frame(i) for i in range(computer.num_frames_ready)]
    return torch.from_numpy(np.stack(frames))


def check_against_kaldi(wave, settings):
    """Check Kaldi's float32 against our float64; our float32 may err at most twice as much."""
    frames, num_frames = Features(settings)(wave[None])
    exact = Features(settings).double()(wave[None].double())[0][0]
    theirs = kaldi(wave, settings).double()
    assert len(theirs) == int(num_frames) == frames.shape[1]
    static = exact[:, : theirs.shape[1]]
    assert_close(theirs, static, atol=1e-3, rtol=0)  # the numbers go up to 70
    ours = frames[0, :, : theirs.shape[1]].double()
    errors = [(frames - static).square().mean().sqrt() for frames in (ours, theirs)]
    assert errors[0] <= 2 * errors[1] + 1e-6


@pytest.mark.parametrize(
    "settings", [FeatureSettings(), SPECTROGRAM, *SHERPA], ids=lambda settings: settings.kind
)
def test_real_speech_gives_kaldis_numbers(sounds, settings):
    for wave in sounds:
        check_against_kaldi(wave, settings)


@pytest.mark.parametrize("rate, lifter", [(16_000, 22.0), (8_000, 22.0), (16_000, 0.0)])
def test_noise_gives_kaldis_numbers_at_other_settings(rate, lifter):
    settings = FeatureSettings(sample_rate=rate, lifter=lifter, num_deltas=0)
    check_against_kaldi(noise(2 * rate), settings)


@pytest.mark.parametrize("settings", SHERPA, ids=lambda settings: settings.kind)
@pytest.mark.parametrize("num_samples", [32_000, 16_079, 16_080, 401, 399, 150, 80])
def test_noise_gives_the_numbers_that_sherpa_onnx_computes(settings, num_samples):
    check_against_kaldi(noise(num_samples), settings)


def test_sound_shorter_than_half_a_shift_has_no_frame_of_sherpa_onnx():
    for num_samples in (79, 1, 0):
        frames, num_frames = Features(SHERPA[0])(noise(num_samples)[None])
        assert frames.shape == (1, 0, 80)
        assert num_frames.tolist() == [0]


def test_the_papers_frames_are_26_numbers_every_10_ms():
    assert FeatureSettings().size == 26
    frames, num_frames = Features()(noise(16_000)[None])
    assert frames.shape == (1, 98, 26)
    assert num_frames.tolist() == [98]
    assert SPECTROGRAM.size == 40


@pytest.mark.parametrize("settings", [FeatureSettings(num_deltas=2), SPECTROGRAM, *SHERPA])
def test_a_batch_gives_what_each_gives_alone_whatever_the_padding(settings):
    lengths = [16_000, 7_777, 401, 400, 399, 0]
    waves = torch.full((len(lengths), 16_000), torch.nan)
    for b, length in enumerate(lengths):
        waves[b, :length] = noise(length, seed=b)
    features = Features(settings)
    frames, num_frames = features(waves, torch.tensor(lengths))
    centred = settings.kind in SHERPA_WINDOWS
    assert num_frames.tolist() == ([100, 49, 3, 3, 2, 0] if centred else [98, 47, 1, 1, 0, 0])
    for b, (length, T) in enumerate(zip(lengths, num_frames.tolist(), strict=True)):
        alone, _ = features(noise(length, seed=b)[None])
        assert alone.shape[1] == T
        assert_close(frames[b, :T], alone[0], atol=1e-4, rtol=0)
        assert not frames[b, T:].any()


def test_silence_is_finite():
    frames, _ = Features()(torch.zeros(1, 16_000))
    assert frames.isfinite().all()


def test_deltas_are_slopes_and_the_ends_repeat():
    ramp = torch.arange(6.0)[None, :, None].repeat(2, 1, 1)
    slopes = deltas(ramp, torch.tensor([6, 4]), reach=2)[..., 0]
    assert_close(slopes[0], torch.tensor([0.5, 0.8, 1.0, 1.0, 0.8, 0.5]))
    assert_close(slopes[1, :4], torch.tensor([0.5, 0.8, 0.8, 0.5]))


@pytest.mark.parametrize(
    "wrong, problem",
    [
        (dict(kind="mfcc"), "kind must be cepstra, log_mel, sherpa or sherpa_streaming, not"),
        (dict(kind="sherpa", sample_rate=800), "so sample_rate must be more than 800"),
        (dict(num_cepstra=26), "num_cepstra must be between 1 and num_channels - 1 = 25"),
        (dict(shift=0.0), "shift must be positive"),
        (dict(window=float("nan")), "window must be positive"),
        (dict(shift=1e-5), "shift must be at least a sample, 1 / 16000 seconds, not 1e-05"),
        (dict(window=1e-6), "window must be at least a sample"),
        (dict(num_deltas=-1), "num_deltas must be at least 0"),
        (dict(num_deltas=1.5), "num_deltas must be a whole number, not 1.5"),
    ],
)
def test_impossible_settings_are_refused(wrong, problem):
    with pytest.raises(ValueError, match=problem):
        FeatureSettings(**wrong)


@pytest.mark.parametrize(
    "waves, num_samples, problem",
    [
        (torch.zeros(500), None, r"waves must be \[B, N\], not \[500\]"),
        (
            torch.zeros(2, 500).double(),
            None,
            "waves must be torch.float32 in .*, not torch.float64",
        ),
        (torch.zeros(2, 500).short(), None, "waves must be torch.float32 in .*, not torch.int16"),
        (torch.zeros(2, 500), [500, 400], "num_samples must be a tensor of integers, not list"),
        (torch.zeros(2, 500), torch.tensor([5.0, 4.0]), "of integers, not torch.float32"),
        (torch.zeros(2, 500), torch.tensor([5]), r"num_samples must be \[B\] = \[2\], not \[1\]"),
        (torch.zeros(2, 500), torch.tensor([5, 501]), r"num_samples\[1\] must be .* 500, not 501"),
    ],
)
def test_what_is_no_batch_of_sounds_is_refused(waves, num_samples, problem):
    with pytest.raises(ValueError, match=problem):
        Features()(waves, num_samples)


def test_the_training_set_has_mean_0_and_deviation_1():
    sequences = [1000 + 3 * torch.randn(n, 4) * torch.tensor([1, 2, 0.01, 0]) for n in (50, 0, 200)]
    statistics = Statistics.over(sequences)
    normalised = torch.cat([statistics.normalise(frames) for frames in sequences])
    assert_close(normalised.mean(0), torch.zeros(4), atol=5e-3, rtol=0)
    assert_close(normalised[:, :3].std(0, correction=0), torch.ones(3), atol=5e-3, rtol=0)
    assert statistics.deviation[3] == 1  # a constant
    with pytest.raises(DataError, match="no frames to compute statistics of"):
        Statistics.over([])


# --- Files --------------------------------------------------------------------------------------


def pair_of(path, **audio):
    return Pair(path.stem, Audio(path, **audio), ("x",), Origin(path.with_name("m.jsonl"), 3))


@pytest.mark.parametrize("kind, subtype", [("wav", "PCM_16"), ("flac", "PCM_16"), ("ogg", "OPUS")])
def test_wav_flac_and_opus_are_read(tmp_path, kind, subtype):
    wave = noise(16_000)
    path = tmp_path / f"a.{kind}"
    soundfile.write(path, wave.numpy(), 16_000, subtype=subtype)
    read = read_wave(Audio(path), 16_000)
    assert len(read) == 16_000
    if subtype == "PCM_16":
        assert_close(read, wave, atol=1 / 32768, rtol=0)


def test_a_part_of_a_file_is_read(tmp_path):
    soundfile.write(tmp_path / "a.wav", noise(16_000).numpy(), 16_000, subtype="FLOAT")
    for start, duration in ((0.25, 0.5), (0.0, 0.5), (0.5, None)):
        part = read_wave(Audio(tmp_path / "a.wav", start, duration), 16_000)
        first = round(start * 16_000)
        assert torch.equal(part, noise(16_000)[first : first + 8000])


def broken_files(folder):
    """Write bad sound files; return their pairs, each with a part of its error."""
    wave = noise(16_000).numpy()
    soundfile.write(folder / "rate.wav", wave, 8_000)
    soundfile.write(folder / "stereo.wav", np.stack([wave, wave], 1), 16_000)
    soundfile.write(folder / "short.wav", wave[:300], 16_000)
    soundfile.write(folder / "cut.wav", wave[:8000], 16_000)
    soundfile.write(folder / "whole.flac", wave, 16_000)
    soundfile.write(folder / "nan.wav", wave * np.nan, 16_000, subtype="FLOAT")
    (folder / "cut.flac").write_bytes((folder / "whole.flac").read_bytes()[:9000])
    (folder / "empty.wav").touch()
    (folder / "samples.raw").write_bytes(bytes(32_000))
    (folder / "text.wav").write_text("this is no sound")
    (folder / "text.mp3").write_text("this is no sound")
    return [
        (
            pair_of(folder / "rate.wav"),
            "has 8000 samples a second where 16000 are wanted; train with "
            "--data.features.sample_rate 8000, or resample it with --data.convert true",
        ),
        (pair_of(folder / "stereo.wav"), "has 2 channels; mix them"),
        (pair_of(folder / "short.wav"), "has 19 ms of sound where a window takes 25; leave"),
        (pair_of(folder / "cut.wav", duration=1.0), "ends after 0.50 of its 1.00 seconds; copy"),
        (pair_of(folder / "nan.wav"), "has samples that are not finite; convert"),
        (pair_of(folder / "cut.flac"), "is not audio that can be read"),
        (pair_of(folder / "samples.raw"), "is not audio that can be read"),
        (pair_of(folder / "empty.wav"), "is not audio that can be read"),
        (pair_of(folder / "text.wav"), "is not audio that can be read (Format not recognised);"),
        (pair_of(folder / "text.mp3"), "text.mp3 is not audio that can be read; record"),
        (pair_of(folder / "none.wav"), "none.wav"),
        (pair_of(folder / "whole.flac", start=30.0, duration=0.9), "offset 30.00 is past its end;"),
        (pair_of(folder / "whole.flac", start=0.9, duration=0.9), "ends after 0.10 of its 0.90"),
    ]


def test_a_change_of_samples_that_keeps_their_number_keeps_that_of_the_frames(tmp_path):
    reader = FrameReader()
    settings = reader.features.settings
    number = settings.window_samples + 3 * settings.shift_samples - 1  # one more makes a frame
    soundfile.write(tmp_path / "a.wav", np.ones(number), settings.sample_rate, subtype="FLOAT")
    pair = pair_of(tmp_path / "a.wav")
    as_it_is = reader.read(pair.source, pair.origin)
    torch.testing.assert_close(reader.read(pair.source, pair.origin, lambda wave: wave), as_it_is)
    assert len(reader.read(pair.source, pair.origin, lambda wave: wave[:9])) == 1


@pytest.mark.parametrize("cached", [False, True])
def test_broken_audio_is_one_sentence_with_the_line_and_is_skipped_and_counted(tmp_path, cached):
    broken = broken_files(tmp_path)
    reader = FrameReader(cache=tmp_path / "cache" if cached else None)
    for pair, problem in broken:
        with pytest.raises(DataError) as raised:
            reader(pair)
        message = str(raised.value)
        assert message.startswith(f"{tmp_path / 'm.jsonl'}, line 3: {pair.source.path}") or (
            pair.name == "none"
        )
        assert problem in message
        assert "\n" not in message
        assert ";" in message
    good = pair_of(tmp_path / "whole.flac")
    pairs = [good, *(pair for pair, _ in broken), good]
    skipped = []
    kept = list(reader.read_all(pairs, skipped))
    assert [pair for pair, _ in kept] == [good, good]
    assert len(skipped) == len(broken)
    with pytest.raises(DataError, match="8000 samples"):
        list(reader.read_all(pairs))


def test_features_files_are_read_and_their_faults_named(tmp_path):
    np.save(tmp_path / "a.npy", np.ones((5, 3), np.float64))
    frames = read_features(Frames(tmp_path / "a.npy"))
    assert (frames.shape, frames.dtype) == ((5, 3), torch.float32)
    bad = {
        "flat": (np.ones(3), "is not an array of frames by numbers; save"),
        "none": (np.ones((0, 3)), "has no frames; leave"),
        "nan": (np.full((2, 3), np.nan), "has a number that is not finite in float32; compute"),
        "wide": (np.ones((2, 4)), "has 4 numbers a frame where 3 are wanted; compute"),
        "huge": (np.full((2, 3), 1e300), "has a number that is not finite in float32; compute"),
        "words": (np.array([["a"]]), "is not an array of frames by numbers; save"),
    }
    for name, (array, problem) in bad.items():
        np.save(tmp_path / f"{name}.npy", array)
        with pytest.raises(DataError, match=problem):
            read_features(Frames(tmp_path / f"{name}.npy"), 3, Origin(tmp_path / "m.jsonl", 1))
    for content in ("no array", "PK no array", "PK\3\4 no array"):
        (tmp_path / "text.npy").write_text(content)
        with pytest.raises(DataError, match=r"line 1: .* is not a \.npy file; write it"):
            read_features(Frames(tmp_path / "text.npy"), 3, Origin(tmp_path / "m.jsonl", 1))


def test_frames_of_two_sizes_do_not_go_together(tmp_path):
    pairs = []
    for line, size in enumerate((3, 3, 4), start=1):
        np.save(tmp_path / f"{line}.npy", np.ones((2, size)))
        origin = Origin(tmp_path / "m.jsonl", line)
        pairs.append(Pair(str(line), Frames(tmp_path / f"{line}.npy"), ("x",), origin))
    skipped = []
    assert len(list(FrameReader().read_all(pairs, skipped))) == 2
    assert "line 3: there are 4 numbers a frame where others have 3; compute" in str(skipped[0])
    assert len(list(FrameReader().read_all(pairs, [], size=4))) == 1


def test_a_path_and_bytes_are_decoded_alike(tmp_path):
    content = encode_wav(noise(8_000), 16_000)
    (tmp_path / "a.wav").write_bytes(content)
    seen = []
    check = lambda sound: seen.append((sound.samplerate, sound.channels))  # noqa: E731
    for file in (tmp_path / "a.wav", io.BytesIO(content)):
        assert_close(decode(file, 16_000, check), noise(8_000), atol=1 / 32768, rtol=0)
    assert seen == [(16_000, 1)] * 2
    part = decode(io.BytesIO(content), 16_000, check, start=0.1, duration=0.2)
    assert torch.equal(part, decode(tmp_path / "a.wav", 16_000, check)[1_600:4_800])
    assert len(decode(io.BytesIO(content), 8_000, check)) == 4_000
    with pytest.raises(UnreadableSound, match="Format not recognised"):
        decode(io.BytesIO(b"this is no sound"), 16_000, check)


# --- The cache ----------------------------------------------------------------------------------


@pytest.fixture
def counted(tmp_path, monkeypatch):
    """Return a pair of a sound file, a list that grows at each computation, and a cache folder."""
    soundfile.write(tmp_path / "a.wav", noise(16_000).numpy(), 16_000)
    calls, forward = [], Features.forward
    monkeypatch.setattr(
        Features, "forward", lambda self, *args: calls.append(0) or forward(self, *args)
    )
    return pair_of(tmp_path / "a.wav"), calls, tmp_path / "cache"


def test_features_are_computed_once(counted):
    pair, calls, cache = counted
    first = FrameReader(cache=cache)(pair)
    again = FrameReader(cache=cache)(pair)
    assert len(calls) == 1
    assert torch.equal(first, again)
    moved = pair.source.path.rename(pair.source.path.with_name("b.wav"))
    assert torch.equal(first, FrameReader(cache=cache)(pair_of(moved)))
    assert len(calls) == 1


def test_the_cache_does_not_hide_a_wrong_duration(counted):
    pair, _, cache = counted
    FrameReader(cache=str(cache))(pair)
    with pytest.raises(DataError, match=r"ends after 1\.00 of its 3\.00 seconds"):
        FrameReader(cache=cache)(pair_of(pair.source.path, duration=3.0))


def test_other_settings_other_audio_and_other_parts_are_computed_anew(counted):
    pair, calls, cache = counted
    for settings in (FeatureSettings(), FeatureSettings(pre_emphasis=0.9), SPECTROGRAM):
        frames = FrameReader(settings, cache)(pair)
        assert torch.equal(frames, Features(settings)(read_wave(pair.source, 16_000)[None])[0][0])
    part = FrameReader(cache=cache)(pair_of(pair.source.path, start=0.5, duration=0.5))
    assert len(part) < 98
    calls.clear()
    soundfile.write(pair.source.path, noise(16_000, seed=1).numpy(), 16_000)
    FrameReader(cache=cache)(pair)
    assert len(calls) == 1


def test_a_damaged_or_unfinished_cache_file_is_replaced(counted):
    pair, calls, cache = counted
    first = FrameReader(cache=cache)(pair)
    (kept,) = cache.iterdir()
    kept.write_bytes(kept.read_bytes()[:100])
    assert torch.equal(first, FrameReader(cache=cache)(pair))
    assert len(calls) == 2
    assert torch.equal(first, FrameReader(cache=cache)(pair))
    assert len(calls) == 2


def test_a_write_that_fails_leaves_nothing(counted, monkeypatch):
    pair, _, cache = counted

    def fail(*paths):
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr("transduce.files.os.replace", fail)
    with pytest.raises(OSError, match="no space") as failure:
        FrameReader(cache=cache)(pair)
    assert failure.value.filename.endswith(".npy")
    assert list(cache.iterdir()) == []


def test_many_threads_may_share_a_cache(counted):
    pair, _, cache = counted
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(FrameReader(cache=cache)(pair)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(result, results[0]) for result in results)
    assert len(results) == 8
    assert len(list(cache.iterdir())) == 1


WRITER = """
import sys
from pathlib import Path
from transduce.audio.cache import FrameReader
from transduce.data.pairs import Audio, Origin, Pair

reader = FrameReader(cache=sys.argv[2])
for path in sorted(Path(sys.argv[1]).glob("*.wav")):
    reader(Pair(path.stem, Audio(path), (), Origin(path)))
"""


@pytest.mark.slow
def test_processes_that_are_killed_leave_whole_files_to_the_others(tmp_path):
    """Two processes fill one folder; one of them is killed meanwhile, at any point of a write."""
    cache = tmp_path / "cache"
    for i in range(60):
        soundfile.write(tmp_path / f"{i:02}.wav", noise(16_000, seed=i).numpy(), 16_000)
    command = [sys.executable, "-c", WRITER, str(tmp_path), str(cache)]
    killed, other = (subprocess.Popen(command, cwd=ROOT) for _ in range(2))
    deadline = time.monotonic() + 120
    while len(list(cache.glob("*.npy"))) < 5:
        assert time.monotonic() < deadline and killed.poll() is None
        time.sleep(0.001)
    killed.kill()
    assert killed.wait() == -signal.SIGKILL
    assert other.wait(timeout=120) == 0
    files = sorted(cache.glob("*.npy"))
    assert len(files) == 60
    assert all(np.load(file).shape == (98, 26) for file in files)
    reader, plain = FrameReader(cache=cache), FrameReader()
    for path in sorted(tmp_path.glob("*.wav")):
        assert torch.equal(reader(pair_of(path)), plain(pair_of(path)))
    assert sorted(cache.glob("*.npy")) == files


def test_a_file_of_many_parts_is_hashed_once_until_it_changes(counted, monkeypatch):
    pair, calls, cache = counted
    opened, original = [], Path.open
    monkeypatch.setattr(
        Path, "open", lambda self, *args: opened.append(self) or original(self, *args)
    )
    parts = [pair_of(pair.source.path, start=0.1 * i, duration=0.1) for i in range(5)]
    reader = FrameReader(cache=cache)
    first = [reader(part) for part in parts]
    assert len(calls) == 5 and opened.count(pair.source.path) == 1
    assert all(map(torch.equal, first, [reader(part) for part in parts])) and len(calls) == 5
    soundfile.write(pair.source.path, noise(20_000, seed=1).numpy(), 16_000)
    assert not torch.equal(reader(parts[0]), first[0])


def test_a_corpus_is_read_in_order_by_many_threads(corpora, tmp_path):
    pairs = read_manifest(corpora / "librispeech-10s" / "dev.jsonl", PHONES, "phones")[:20]
    reader = FrameReader(cache=tmp_path)
    for _ in range(2):
        read = list(reader.read_all(pairs, num_threads=4))
        assert [pair for pair, _ in read] == pairs
        for pair, frames in read:
            assert abs(len(frames) / 100 - pair.source.duration) < 0.05


def test_no_more_of_a_corpus_is_read_than_will_soon_be_wanted(counted):
    pair, calls, _ = counted
    read = FrameReader().read_all([pair] * 100, num_threads=2)
    next(read)
    time.sleep(0.5)  # give the threads time to read too much
    read.close()
    assert len(calls) <= 5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU")
@pytest.mark.parametrize("settings", [FeatureSettings(), SPECTROGRAM])
def test_the_gpu_agrees(settings):
    waves, lengths = noise(32_000).view(2, -1), torch.tensor([16_000, 9_000])
    expected, num_frames = Features(settings)(waves, lengths)
    frames, counts = Features(settings).cuda()(waves.cuda(), lengths.cuda())
    assert torch.equal(counts.cpu(), num_frames)
    assert_close(frames.cpu(), expected, atol=1e-3, rtol=0)  # the numbers go up to 70


# --- Headers that claim too much ----------------------------------------------------------------


def flac_of(path, claimed):
    """Write a second of FLAC whose header claims another number of samples."""
    soundfile.write(path, np.zeros(16000), 16000)
    content = bytearray(path.read_bytes())
    content[21] = (content[21] & 0xF0) | claimed >> 32
    content[22:26] = (claimed & 0xFFFFFFFF).to_bytes(4, "big")
    path.write_bytes(content)


def test_a_flac_header_that_claims_terabytes_takes_no_memory(tmp_path, limited_memory):
    path = tmp_path / "a.flac"
    flac_of(path, 16000)
    assert len(read_wave(Audio(path), 16000)) == 16000
    flac_of(path, (1 << 36) - 1)
    with pytest.raises(DataError, match="is not audio that can be read"):
        read_wave(Audio(path), 16000)


@pytest.mark.parametrize("size", ["3", "999999999999999"])
def test_a_sphere_header_of_an_impossible_size_is_named(tmp_path, limited_memory, size):
    path = tmp_path / "a.sph"
    path.write_bytes(f"NIST_1A\n{size:>7}\nsample_count -i 9\nend_head\n".encode().ljust(2048))
    with pytest.raises(DataError) as error:
        read_wave(Audio(path), 16000)
    assert str(error.value) == (
        f"{path} is not audio that can be read (its header claims {size} bytes); record or convert "
        "it again"
    )


@pytest.mark.parametrize("shape", [(10**12, 26), (10**22, 26)])
def test_a_npy_header_that_claims_terabytes_is_refused(tmp_path, limited_memory, shape):
    path = tmp_path / "a.npy"
    np.save(path, np.zeros((3, 26), np.float32))
    path.write_bytes(
        path.read_bytes().replace(b"(3, 26), }" + b" " * 40, f"{shape}, }}".encode().ljust(50))
    )
    assert str(shape).encode() in path.read_bytes()
    with pytest.raises(DataError) as error:
        read_features(Frames(path))
    assert str(error.value) == f"{path} is not a .npy file; write it with numpy.save"


@pytest.fixture
def limited_memory():
    """Let the process have no more than 8 GB more than it has."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + (8 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def test_the_error_of_a_file_names_it_once(tmp_path):
    for path, read in (
        (tmp_path / "nothing.wav", lambda path: read_wave(Audio(path), 16000)),
        (tmp_path / "nothing.npy", lambda path: read_features(Frames(path))),
    ):
        with pytest.raises(DataError) as error:
            read(path)
        assert str(error.value) == f"there is no file {path}; check the path"
    origin = Origin(tmp_path / "pairs.jsonl", 3)
    with pytest.raises(DataError) as error:
        read_wave(Audio(path), 16000, origin)
    assert str(error.value) == f"{origin}: there is no file {path}; check the path"


def test_a_path_with_a_null_byte_is_an_error_that_names_it(tmp_path):
    pair = Pair("a", Audio(Path("a\0.wav")), (), Origin("a.jsonl", 1))
    for cache in (None, tmp_path):
        with pytest.raises(DataError, match=r"a.jsonl, line 1: .*a\x00.wav.*; check the"):
            FrameReader(cache=cache)(pair)
