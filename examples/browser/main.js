// The page: words to phonemes, and the microphone to phones.

import { decoded, record } from "./recorder.js";
import { load } from "./transducer.js";

const LONGEST = 30; // seconds of a recording
const find = (id) => document.getElementById(id);

// Load a model when it is first needed; show an error in `status`.
function loader(folder, status) {
  let model = null;
  return async () => {
    if (!model) {
      status.textContent = "loading the model …";
      model = load(folder);
      model.catch(() => (model = null));
    }
    const loaded = await model;
    status.textContent = "";
    return loaded;
  };
}

// Run an action; show its error as a sentence.
async function attempt(status, action) {
  status.classList.remove("error");
  try {
    await action();
  } catch (error) {
    status.classList.add("error");
    status.textContent = error.message;
  }
}

const pronouncer = loader("models/english-pronouncer", find("word-status"));
let asked = 0;

function pronounceWords() {
  const now = ++asked;
  const words = find("word").value.split(/[\s\-\u2010-\u2015]+/u);
  const bare = words.map((word) => word.replace(/^[\p{P}]+|[\p{P}]+$/gu, "")).filter(Boolean);
  return attempt(find("word-status"), async () => {
    const model = await pronouncer();
    const results = [];
    for (const word of bare) {
      const found = await model.pronounce(word);
      results.push(found.map(({ symbol }) => symbol).join(" "));
    }
    if (now === asked) find("phonemes").textContent = results.join("  ·  ");
  });
}

const recogniser = loader("models/english-phone-recogniser", find("sound-status"));
let stop = null;

async function recognise(samples) {
  const status = find("sound-status");
  const model = await recogniser();
  status.textContent = "recognising …";
  const began = performance.now();
  const found = await model.recognise(samples);
  const seconds = samples.length / model.description.features.sample_rate;
  find("phones").replaceChildren(
    ...found.map(({ symbol, seconds: at }) => {
      const phone = document.createElement("span");
      phone.textContent = symbol;
      phone.title = `${at.toFixed(2)} s`;
      return phone;
    }),
  );
  const took = (performance.now() - began) / 1000;
  status.textContent = `${found.length} phones in ${seconds.toFixed(1)} s of sound, found in ${took.toFixed(1)} s`;
  window.heard = samples; // for those who want to look at them in the console
}

async function toggleRecording() {
  const button = find("record");
  await attempt(find("sound-status"), async () => {
    if (stop) {
      const finish = stop;
      stop = null;
      button.textContent = "Record";
      find("level").value = 0;
      await recognise(await finish());
      return;
    }
    const model = await recogniser();
    const rate = model.description.features.sample_rate;
    stop = await record(rate, (level) => (find("level").value = Math.min(1, 4 * level)));
    const mine = stop;
    button.textContent = "Stop";
    find("sound-status").textContent = `recording, at most ${LONGEST} seconds …`;
    setTimeout(() => stop === mine && toggleRecording(), 1000 * LONGEST);
  });
}

find("word").addEventListener("input", pronounceWords);
find("record").addEventListener("click", toggleRecording);
find("file").addEventListener("change", ({ target }) =>
  attempt(find("sound-status"), async () => {
    const model = await recogniser();
    const bytes = await target.files[0].arrayBuffer();
    const samples = await decoded(bytes, model.description.features.sample_rate).catch(() => {
      throw new Error(`${target.files[0].name} is no sound that this browser reads`);
    });
    await recognise(samples);
  }),
);
pronounceWords();
