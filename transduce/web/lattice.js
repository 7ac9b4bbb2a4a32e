// An output lattice from the server, and the values that the page computes from it.
//
// A figure has time on its horizontal axis, in columns t, and symbols on its vertical one, in rows u.
// These are the paper's t and u, except in the lattice of a continuous transducer (speech.js), whose
// outputs are the time and whose inputs are the symbols: there they change places.

import { fetchSensitivity } from "./api.js";
import { HEAT, between, painted } from "./colours.js";

export const MAPS = {
  forward: { values: "log_alpha", symbol: "α(t,u)", words: "forward variables", equation: 16 },
  backward: { values: "log_beta", symbol: "β(t,u)", words: "backward variables", equation: 18 },
  product: {
    values: "log_product",
    symbol: "α(t,u) β(t,u) / Pr(y|x)",
    words: "forward × backward variables",
    equation: 19,
  },
};
const NATS_BELOW_THE_PATH = 15; // range of the logarithmic colours below the best path

export class Lattice {
  // `grows` is whether more of the input is still to come.
  constructor({ header, arrays }, { symbols, frames_per_vector: pooling }, grows = false) {
    this.grows = grows;
    this.view = header.view;
    this.target = header.target;
    this.source = header.source; // the symbols of the input; null for sound
    this.logLikelihood = header.log_likelihood;
    this.path = header.best_path; // the nodes [t, u] of the most probable alignment
    this.timings = header.timings;
    this.arrays = arrays;
    this.backwards = header.backwards; // whether the network reads from right to left
    Object.assign(this, { pooling, firstFrame: header.first_frame });
    this.outputs = ["∅", ...symbols];
    [this.T, this.numOutputs] = arrays.transcription.shape;
    this.U = this.target.length;
    this.rows = this.U + 1;
    Object.assign(this, { maps: MAPS, axis: "y" }); // the rows are outputs
    // What the sensitivities below the map and beside it are of.
    Object.assign(this, { alongTime: "inputs", alongSymbols: "previous outputs" });
  }

  // Convert a column and a row to the paper's node t,u, and back.
  node(t, u) {
    return [t, u];
  }

  place(t, u) {
    return [t, u];
  }

  // The sequence of symbols in words.
  get words() {
    return this.target.join(" ") || "(empty)";
  }

  // Ask for the sensitivities of a node.
  ask(t, u) {
    return fetchSensitivity(this.view, t, u);
  }

  // Return the sensitivities for the map below, [frames, D], and for that beside, [K, rows].
  sensitivities({ inputs, outputs }) {
    const [{ rows }, K] = [this, outputs.shape[1]];
    const values = new Float32Array(K * rows);
    for (let row = 0; row < rows; row++) {
      const i = this.last(row);
      for (let k = 0; k < K && i >= 0; k++) values[k * rows + row] = outputs.values[i * K + k];
    }
    return { alongTime: inputs, alongSymbols: { values, shape: [K, rows] } };
  }

  // The symbols that the columns of the sensitivities beside the map are of.
  get alphabet() {
    return this.outputs.slice(1);
  }

  // Return the symbol of row u among those; -1 if it is not emitted yet at the crosshair's row.
  symbolOf(u, here) {
    const i = this.last(u);
    if (i < 0 || (this.backwards ? u < here : u > here)) return -1; // not emitted yet
    return this.outputs.indexOf(this.target[i], 1) - 1;
  }

  // The output whose probability the sensitivities are of, in row u.
  sensitive(u) {
    return this.outputs[this.next(u)];
  }

  // Return the logarithm of a map at a node.
  at(map, t, u) {
    return this.arrays[MAPS[map].values].values[t * (this.U + 1) + u];
  }

  // Return Pr(k|t,u) and the distributions of the two networks alone, each [K+1] (Eqs. 12-13).
  bars(t, u) {
    const K1 = this.numOutputs;
    const f = this.arrays.transcription.values.subarray(t * K1, (t + 1) * K1);
    const g = this.arrays.prediction.values.subarray(u * K1, (u + 1) * K1);
    return {
      output: softmax(f.map((x, k) => x + g[k])),
      transcription: softmax(f),
      prediction: softmax(g),
    };
  }

  // Return the id of the label that the network emits next in row u; 0 after the last.
  next(u) {
    const symbol = this.target[this.backwards ? u - 1 : u];
    return symbol === undefined ? 0 : this.outputs.indexOf(symbol, 1);
  }

  // Return the index of the label that was emitted last in row u; -1 if there is none.
  last(u) {
    if (this.backwards) return u < this.U ? u : -1;
    return u - 1;
  }

  // Return the name of row u: the label that was emitted last.
  rowName(u) {
    return this.target[this.last(u)] ?? "∅";
  }

  // Convert a time in transcription vectors to frames. A network that reads backwards pools from the
  // end, so its first vector may begin before frame 0.
  frame(t) {
    return this.pooling * t + this.firstFrame;
  }

  // Convert a time in frames to transcription vectors.
  vector(frame) {
    return (frame - this.firstFrame) / this.pooling;
  }

  // Return the range of logarithms that the colours of a map cover.
  range(map) {
    if (map === "product") return [-NATS_BELOW_THE_PATH, 0];
    const onPath = this.path.map(([t, u]) => this.at(map, t, u)).filter(Number.isFinite);
    const lowest = onPath.reduce((a, b) => Math.min(a, b), 0);
    return [lowest - NATS_BELOW_THE_PATH, onPath.reduce((a, b) => Math.max(a, b), lowest)];
  }

  // Draw the heat map, one pixel for each node.
  image(map, scale) {
    const { values } = this.arrays[MAPS[map].values];
    return heatMap(values, this.T, this.rows, this.range(map), scale);
  }

  // Draw the spectrogram or the frames in greys; null for text.
  picture(theme) {
    return greys(this.arrays.picture, theme);
  }
}

// Draw logarithms [columns, rows] as a heat map whose colours cover a range.
export function heatMap(values, columns, rows, [low, high], scale) {
  const position =
    scale === "log" ? (x) => (x - low) / (high - low || 1) : (x) => Math.exp(x - high);
  return painted(values, columns, rows, position, HEAT);
}

// Draw frames in greys; return null if they have no numbers.
export function greys({ shape, values }, theme) {
  if (shape[1] === 0) return null;
  const sorted = Float32Array.from(values).sort();
  const low = sorted[Math.floor(0.05 * (sorted.length - 1))];
  const high = sorted[Math.floor(0.998 * (sorted.length - 1))];
  const scale = (x) => (x - low) / (high - low || 1);
  return painted(values, ...shape, scale, between(theme.low, theme.high));
}

export function softmax(scores) {
  const exponentials = Array.from(scores);
  const largest = Math.max(...exponentials);
  let total = 0;
  for (let k = 0; k < exponentials.length; k++) {
    exponentials[k] = Math.exp(exponentials[k] - largest);
    total += exponentials[k];
  }
  return exponentials.map((x) => x / total);
}

// The visible part of the lattice: t0 <= t < t1 and u0 <= u < u1.
export class Viewport {
  constructor(T, rows) {
    Object.assign(this, { T, rows });
    this.fit();
  }

  fit() {
    Object.assign(this, { t0: 0, t1: this.T, u0: 0, u1: this.rows });
  }

  set(t0, t1, u0, u1) {
    [this.t0, this.t1] = inside(t0, t1, this.T, 3);
    [this.u0, this.u1] = inside(u0, u1, this.rows, 2);
  }

  // Zoom by `factor` about the point (t, u), which stays in place.
  zoom(factor, t, u, timeOnly = false) {
    const about = (x, from, to) => [x - (x - from) / factor, x + (to - x) / factor];
    const rows = timeOnly ? [this.u0, this.u1] : about(u, this.u0, this.u1);
    this.set(...about(t, this.t0, this.t1), ...rows);
  }

  move(dt, du) {
    this.set(this.t0 + dt, this.t1 + dt, this.u0 + du, this.u1 + du);
  }

  // Scroll, if need be, so that the node is visible.
  show(t, u) {
    const beyond = (x, from, to) => Math.min(0, x - from) + Math.max(0, x + 1 - to);
    this.move(beyond(t, this.t0, this.t1), beyond(u, this.u0, this.u1));
  }

  get isWhole() {
    return this.t0 === 0 && this.u0 === 0 && this.t1 === this.T && this.u1 === this.rows;
  }
}

function inside(from, to, size, least) {
  const length = Math.min(size, Math.max(Math.min(least, size), to - from));
  const start = Math.min(size - length, Math.max(0, (from + to - length) / 2));
  return [start, start + length];
}
