// An exported transducer in onnxruntime-web: the greedy search.

import * as ort from "./node_modules/onnxruntime-web/dist/ort.wasm.min.mjs";
import { frameComputer } from "./features.js";

ort.env.wasm.wasmPaths = new URL("./node_modules/onnxruntime-web/dist/", import.meta.url).href;
ort.env.wasm.numThreads = 1; // more need headers that simple servers do not send

const MOST_LABELS = 10; // at one vector

// Load the folder that `transduce export` wrote.
export async function load(folder) {
  const answer = await fetch(`${folder}/model.json`);
  if (!answer.ok) throw new Error(`there is no ${folder}/model.json; export a model to ${folder}`);
  const description = await answer.json();
  const files = ["encoder.onnx", "decoder.onnx", "joiner.onnx"];
  const sessions = [];
  for (const file of files) sessions.push(await ort.InferenceSession.create(`${folder}/${file}`));
  return new Transducer(description, sessions);
}

class Transducer {
  constructor(description, [encoder, decoder, joiner]) {
    Object.assign(this, { description, encoder, decoder, joiner });
    if (description.features) this.frames = frameComputer(description.features);
  }

  // Return the symbols of a word and the ends of what was heard: [{ symbol, vector }].
  async pronounce(word) {
    const ids = this.ids(word);
    const symbols = new ort.Tensor("int64", BigInt64Array.from(ids, BigInt), [1, ids.length]);
    return this.search({ symbols, length: lengths(ids.length) });
  }

  // Return the symbols of samples at description.features.sample_rate, with times in seconds.
  async recognise(samples) {
    const { data, T, size } = this.frames(samples);
    if (T === 0) throw new Error("the sound is shorter than a window; record more");
    const turned = new Float32Array(data.length); // [size, T]
    for (let t = 0; t < T; t++) {
      for (let d = 0; d < size; d++) turned[d * T + t] = data[t * size + d];
    }
    const audio_signal = new ort.Tensor("float32", turned, [1, size, T]);
    const found = await this.search({ audio_signal, length: lengths(T) });
    const { shift, window, convention } = this.description.features;
    const first = convention.centred ? shift / 2 : window / 2;
    const step = shift * this.description.pooling;
    return found.map(({ symbol, vector }) => ({ symbol, seconds: first + step * vector }));
  }

  // Return the ids of a word's letters; throw an Error that names a letter the model lacks.
  ids(word) {
    const known = new Map(this.description.sources.map((symbol, id) => [symbol, id]));
    const spelt = (letter) =>
      [letter, letter.toLowerCase(), letter.toUpperCase(), letter === "’" ? "'" : letter].find(
        (one) => known.has(one),
      );
    // Letters lose their accents if the model lacks them.
    const letters = [...word].flatMap((letter) =>
      spelt(letter) === undefined ? [...letter.normalize("NFKD").replace(/\p{M}/gu, "")] : [letter],
    );
    return letters.map((letter) => {
      const symbol = spelt(letter);
      if (symbol === undefined) throw new Error(`the model does not know ${letter}; write a word`);
      return known.get(symbol);
    });
  }

  // Search greedily: take the best output at every node.
  async search(inputs) {
    const { targets, prediction_layers: layers, prediction_size: size } = this.description;
    const null_ = targets.length;
    const encoded = (await this.encoder.run(inputs)).outputs; // [1, K+1, T']
    const [, K, T] = encoded.dims;
    const zeros = () => new ort.Tensor("float32", new Float32Array(layers * size), [layers, 1, size]);
    let state = await this.step(null_, zeros(), zeros());
    const found = [];
    for (let t = 0; t < T; t++) {
      const f = Float32Array.from({ length: K }, (_, k) => encoded.data[k * T + t]);
      const encoder_outputs = new ort.Tensor("float32", f, [1, K, 1]);
      for (let n = 0; n < MOST_LABELS; n++) {
        const joined = await this.joiner.run({ encoder_outputs, decoder_outputs: state.outputs });
        const logits = joined.outputs.data;
        const best = logits.indexOf(logits.reduce((a, b) => Math.max(a, b)));
        if (best === null_) break;
        found.push({ symbol: targets[best], vector: t });
        state = await this.step(best, state.h_next, state.c_next);
      }
    }
    return found;
  }

  // Let the prediction network read one more label.
  step(label, h, c) {
    const targets = new ort.Tensor("int32", Int32Array.of(label), [1, 1]);
    const target_length = new ort.Tensor("int32", Int32Array.of(1), [1]);
    return this.decoder.run({ targets, target_length, h, c });
  }
}

const lengths = (n) => new ort.Tensor("int64", BigInt64Array.of(BigInt(n)), [1]);
