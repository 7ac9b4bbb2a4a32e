// The sound of an input, and how far it has been played.

import { fetchSound } from "./api.js";

export class Player {
  // `told` has time(seconds), while it plays, and stopped().
  constructor(told) {
    this.told = told;
    this.audio = new Audio();
    this.audio.addEventListener("ended", () => told.stopped());
    this.audio.addEventListener("pause", () => told.stopped());
  }

  // Forgets what it has, and loads an input's sound when it is first played.
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

  // From where it was paused, unless that is not between these times, in seconds.
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
      this.told.time(this.audio.currentTime);
      requestAnimationFrame(follow);
    };
    follow();
  }
}
