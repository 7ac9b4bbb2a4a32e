// Recordings of the microphone: the samples go to the server while they come, if the model can
// transcribe them so, and become a WAV file at the end.

import { Problem, openStream } from "./api.js";

const PIECE_SECONDS = 0.1; // of sound in a message: a lower latency against more messages

// Reasons why the browser gives no microphone, by the name of its error.
const REASONS = {
  NotAllowedError: "The browser does not allow the microphone; allow it, and record again.",
  NotFoundError: "There is no microphone; connect one, or choose a sound file.",
  NotReadableError: "Another program uses the microphone; close it, and record again.",
  NotSupportedError: "This browser cannot record at the model's sample rate; use another one.",
};

export class Recording {
  // `callbacks` has full(), called at the longest duration, and failed(problem), called if the
  // server ends the stream.
  constructor(model, callbacks) {
    Object.assign(this, { model, callbacks, parts: [], length: 0, sent: 0 });
    Object.assign(this, { input: null, stable: [], unstable: [], isStopped: false });
  }

  get seconds() {
    return this.length / this.model.sample_rate;
  }

  // The symbols of the best hypothesis so far.
  get symbols() {
    return [...this.stable, ...this.unstable];
  }

  async start() {
    try {
      await this.openMicrophone();
      if (this.model.streams) await this.openSocket();
    } catch (error) {
      this.close();
      throw error;
    }
  }

  async openMicrophone() {
    if (!navigator.mediaDevices) {
      throw new Problem("The microphone works only on localhost or over https; open the page there.");
    }
    const audio = { echoCancellation: false, noiseSuppression: false, autoGainControl: false };
    try {
      this.stream = await navigator.mediaDevices.getUserMedia({ audio });
      this.context = new AudioContext({ sampleRate: this.model.sample_rate });
      await this.context.audioWorklet.addModule(new URL("./collector.js", import.meta.url));
      const collector = new AudioWorkletNode(this.context, "collector", { numberOfOutputs: 0 });
      collector.port.onmessage = ({ data }) => this.heard(data);
      this.context.createMediaStreamSource(this.stream).connect(collector);
    } catch (error) {
      if (!(error instanceof DOMException)) throw error;
      throw new Problem(REASONS[error.name] ?? `The microphone cannot be used (${error.name}).`);
    }
  }

  async openSocket() {
    this.socket = await openStream({
      begin: ({ input }) => (this.input = input),
      partial: ({ stable, unstable }) => {
        this.stable.push(...stable.map(({ symbol }) => symbol));
        this.unstable = unstable.map(({ symbol }) => symbol);
      },
      failed: (problem) => this.isStopped || this.callbacks.failed(problem),
    });
    this.send();
  }

  heard(samples) {
    if (this.isStopped) return;
    const most = this.model.max_seconds * this.model.sample_rate - this.length;
    const part = Int16Array.from(samples.subarray(0, most), (x) =>
      Math.round(Math.min(1, Math.max(-1, x)) * 32767),
    );
    this.parts.push(part);
    this.length += part.length;
    if (this.length - this.sent >= PIECE_SECONDS * this.model.sample_rate) this.send();
    if (part.length === most) this.callbacks.full();
  }

  // Send what was not sent yet.
  send() {
    if (this.socket?.readyState !== WebSocket.OPEN) return;
    const samples = this.samples().subarray(this.sent);
    if (samples.length) this.socket.send(samples);
    this.sent = this.length;
  }

  samples() {
    const samples = new Int16Array(this.length);
    this.parts.reduce((place, part) => (samples.set(part, place), place + part.length), 0);
    this.parts = [samples];
    return samples;
  }

  // Stop recording; more calls do nothing.
  close() {
    if (this.isStopped) return;
    this.isStopped = true;
    this.stream?.getTracks().forEach((track) => track.stop());
    this.context?.close();
    this.socket?.close();
  }

  // Return the recording as a WAV file.
  file() {
    if (!this.length) throw new Problem("The microphone gave no sound; record longer.");
    return new File([wavHeader(this.length, this.model.sample_rate), this.samples()], "recording.wav");
  }
}

// Return the header of a WAV file of 16 bits and one channel.
function wavHeader(length, rate) {
  const view = new DataView(new ArrayBuffer(44));
  const text = (place, letters) =>
    [...letters].forEach((letter, i) => view.setUint8(place + i, letter.charCodeAt(0)));
  text(0, "RIFF");
  view.setUint32(4, 36 + 2 * length, true);
  text(8, "WAVEfmt ");
  view.setUint32(16, 16, true);
  view.setUint16(20, 1, true); // PCM
  view.setUint16(22, 1, true); // channels
  view.setUint32(24, rate, true);
  view.setUint32(28, 2 * rate, true); // bytes a second
  view.setUint16(32, 2, true); // bytes a sample
  view.setUint16(34, 16, true);
  text(36, "data");
  view.setUint32(40, 2 * length, true);
  return view.buffer;
}
