// Players for the sound of an input: one for all of it, one for stretches.

import { fetchSound } from "./api.js";

export class Player {
  // `callbacks` has time(seconds), called while the sound plays, and stopped().
  constructor(callbacks) {
    this.callbacks = callbacks;
    this.audio = new Audio();
    this.audio.addEventListener("ended", () => callbacks.stopped());
    this.audio.addEventListener("pause", () => callbacks.stopped());
  }

  // Drop the current sound; `play` loads that of the new input.
  setInput(input) {
    this.audio.pause();
    if (this.address) URL.revokeObjectURL(this.address);
    Object.assign(this, { input, address: null });
  }

  get playing() {
    return !this.audio.paused;
  }

  pause() {
    this.audio.pause();
  }

  // Play on from the pause; if that is not between `from` and `to` (seconds), start at `from`.
  async play(from, to) {
    if (!this.address) {
      this.address = URL.createObjectURL(await fetchSound(this.input));
      this.audio.src = this.address;
    }
    const { currentTime, duration } = this.audio;
    if (currentTime < from || currentTime >= Math.min(to, duration - 0.02)) {
      this.audio.currentTime = from;
    }
    await this.audio.play();
    const follow = () => {
      if (this.audio.paused) return;
      this.callbacks.time(this.audio.currentTime);
      requestAnimationFrame(follow);
    };
    follow();
  }
}

export class StretchPlayer {
  setInput(input) {
    this.stop();
    Object.assign(this, { input, samples: null });
  }

  stop() {
    this.node?.stop();
    this.node = null;
    this.turn = {}; // a stretch that is still to begin belongs to an earlier turn
  }

  // Play from one time to another, in seconds; call ended() at its end, or when it is stopped.
  async play(from, to, ended) {
    this.stop();
    const { turn } = this;
    this.context ??= new AudioContext();
    this.samples ??= this.load();
    const buffer = await this.samples;
    await this.context.resume();
    if (this.turn !== turn) return ended();
    this.node = new AudioBufferSourceNode(this.context, { buffer });
    this.node.connect(this.context.destination);
    this.node.onended = ended;
    this.node.start(0, from, to - from);
  }

  async load() {
    try {
      const sound = await fetchSound(this.input);
      return await this.context.decodeAudioData(await sound.arrayBuffer());
    } catch (error) {
      this.samples = null; // the next click tries again
      throw error;
    }
  }
}
