// Runs in the audio thread: sends the first channel of the sound to the page.
registerProcessor(
  "collector",
  class extends AudioWorkletProcessor {
    process([channels]) {
      if (channels.length) this.port.postMessage(channels[0].slice());
      return true;
    }
  },
);
