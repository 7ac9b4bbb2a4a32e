"""The utterances of live sound, one after the other: partial transcripts as JSON values.

    {"type": "partial", "stable": [phone, ...], "unstable": [phone, ...], "endpoint": bool}

`stable` has the phones that have become final since the last message: readers append them.
`unstable` has those after them, which may still change.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from transduce.model.stream import Partial, Stream
from transduce.model.transcripts import Transcript

Message = dict[str, Any]


@dataclass(eq=False)
class Utterances:
    """A stream, and what was told of its utterance."""

    stream: Stream
    begun: float = 0.0  # seconds of sound before the utterance, which are added to times
    num_told: int = 0  # stable labels
    told: Message = field(default_factory=dict)  # the rest of the last message

    def partial(self, partial: Partial) -> Message | None:
        """Return the message of a partial transcript; None if it says nothing new."""
        new = list[Message]()
        if partial.num_stable > self.num_told:
            new = self._phones(partial.stable, self.num_told)
            self.num_told = partial.num_stable
        rest = {"unstable": self._phones(partial.unstable), "endpoint": partial.is_endpoint}
        if not new and rest == self.told:
            return None
        self.told = rest
        return {"type": "partial", "stable": new, **rest}

    def finish(self) -> Transcript:
        """End the utterance, and begin with the next one; return its transcript."""
        transcript = self.stream.finish()
        self.stream.reset()
        self.num_told, self.told = 0, {}
        return transcript

    def _phones(self, transcript: Transcript, first: int = 0) -> list[Message]:
        """Return the labels from the first on: the middles of their vectors, and their confidence.

        Their intervals are known only when the next label is.
        """
        best, transcript = transcript.hypotheses[0], transcript.shifted(self.begun)
        return [
            {
                "symbol": symbol,
                "peak": round(transcript.middle(timing.frame), 3),
                "confidence": round(timing.confidence, 4),
            }
            for symbol, timing in zip(
                transcript.alphabet.decode(best.labels[first:]), best.timings[first:], strict=True
            )
        ]
