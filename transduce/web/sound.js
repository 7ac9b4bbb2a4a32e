// A player for the sound of an input.

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
