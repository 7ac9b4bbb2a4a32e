"""The command that lets a continuous transducer speak."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from transduce.alignment.pronunciations import said_symbols
from transduce.cli.runs import Device, load_runs
from transduce.cli.terminal import user_errors
from transduce.data.pairs import Symbols
from transduce.decoding.generation import GenerationOptions
from transduce.model.model import Model
from transduce.model.speech import conditions
from transduce.model.speech import speak as speak_symbols


def speak(
    run: Path,
    text: str,
    /,
    *,
    speaker: str | None = None,
    output: Annotated[Path | None, Parameter(alias="-o")] = None,
    temperature: float = GenerationOptions.temperature,
    durations: Literal["median", "drawn"] = GenerationOptions.durations,
    seed: int = GenerationOptions.seed,
    device: Device = "cpu",
) -> None:
    """Say a text with a continuous transducer, and write the sound to a WAV file.

    Example: transduce speak runs/speak-digits seven --speaker theo -o seven.wav

    The command prints the file, and when each symbol is said.

    Parameters
    ----------
    run
        The folder of a run, or its model.safetensors.
    text
        Words, or the symbols that the model reads, with spaces between them.
    speaker
        The voice, if the model has several.
    output
        The WAV file to write; by default speech.wav.
    temperature
        How much the frames vary: 0 takes means, 1 draws from the model's own distribution.
    durations
        How long each symbol is said: median, or drawn at random.
    seed
        The seed of what is drawn.
    device
        The device to compute on.
    """
    with user_errors():
        options = GenerationOptions(temperature, durations, seed=seed)
        path = output or Path("speech.wav")
        if path.suffix.lower() != ".wav":
            raise ValueError(f"{path} must end in .wav; sound is written as WAV")
        model = load_runs([run], device)
        [speech] = speak_symbols(model, [source_symbols(model, text, speaker)], options)
        speech.save(path)
        print(path)
        for symbol, start, end in speech.intervals:
            print(f"{start:.2f}\t{end:.2f}\t{symbol}")


def source_symbols(model: Model, text: str, speaker: str | None) -> Symbols:
    """Return the source symbols of a text: the speaker's, then the text's own or its phones."""
    if model.signature.outputs is None:
        raise ValueError(
            f"a {model.network.kind} network outputs labels, and does not speak; give a run of a "
            "continuous transducer"
        )
    said = said_symbols(model.signature, text)
    voices = conditions(model.signature).get("speaker", [])
    if any(symbol.startswith("speaker=") for symbol in said):
        voices = []  # the text names one
    if speaker is None and not voices:
        return said
    if speaker not in voices:
        names = ", ".join(voices)
        problem = "give a --speaker" if speaker is None else f"there is no speaker {speaker!r}"
        raise ValueError(
            f"{problem}; the model has {names}" if voices else f"{problem}; leave --speaker out"
        )
    return (f"speaker={speaker}", *said)
