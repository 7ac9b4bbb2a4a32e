// The microphone and sound files -> samples at the rate of a model.

// Start to record; return a function that stops and returns the samples at `rate`.
export async function record(rate, onLevel) {
  const constraints = { echoCancellation: false, noiseSuppression: false, autoGainControl: false };
  const stream = await navigator.mediaDevices.getUserMedia({ audio: constraints });
  const context = new AudioContext();
  await context.audioWorklet.addModule(new URL("./collector.js", import.meta.url));
  const collector = new AudioWorkletNode(context, "collector", { numberOfOutputs: 0 });
  const parts = [];
  collector.port.onmessage = ({ data }) => {
    parts.push(data);
    onLevel(Math.sqrt(data.reduce((sum, x) => sum + x * x, 0) / data.length));
  };
  context.createMediaStreamSource(stream).connect(collector);
  return async () => {
    stream.getTracks().forEach((track) => track.stop());
    await context.close();
    const samples = new Float32Array(parts.reduce((sum, part) => sum + part.length, 0));
    parts.reduce((place, part) => (samples.set(part, place), place + part.length), 0);
    if (!samples.length) throw new Error("the microphone gave no sound; record longer");
    const buffer = new AudioBuffer({ length: samples.length, sampleRate: context.sampleRate });
    buffer.copyToChannel(samples, 0);
    return resampled(buffer, rate);
  };
}

// Return the samples of a sound file at `rate`, its channels averaged.
export async function decoded(bytes, rate) {
  const context = new OfflineAudioContext(1, 1, rate);
  return resampled(await context.decodeAudioData(bytes), rate);
}

async function resampled(buffer, rate) {
  const context = new OfflineAudioContext(1, Math.ceil(buffer.duration * rate), rate);
  const source = new AudioBufferSourceNode(context, { buffer });
  source.connect(context.destination);
  source.start();
  return (await context.startRendering()).getChannelData(0);
}
