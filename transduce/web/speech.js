// The output lattice of a continuous transducer, with what the figure asks of a lattice (see
// lattice.js). Its columns t are the paper's u, the outputs so far, which are frames of sound; its
// rows u are the paper's t, the symbols of the input.

import { fetchNode } from "./api.js";
import { greys, heatMap } from "./lattice.js";

export const SPEECH_MAPS = {
  product: {
    values: "log_product",
    symbol: "α(t,u) β(t,u) / Pr(y|x)",
    words: "forward × backward variables",
    equation: 19,
  },
  null: { values: "log_null", symbol: "Pr(∅|t,u)", words: "probability of null" },
  fit: {
    values: "log_fit",
    symbol: "p(y|t,u) / max over t",
    words: "density of the next output",
  },
};
const RANGE = 15; // nats below 1 that the logarithmic colours cover

export class SpeechLattice {
  // `generation` has the options of generated speech; null for a recording.
  constructor({ header, arrays }, { symbols, frames_per_vector: stacking }, generation) {
    Object.assign(this, { generation, stacking, speaks: true, grows: false, maps: SPEECH_MAPS });
    this.view = header.view;
    this.names = header.names; // of the rows
    this.symbols = header.symbols; // the input
    this.pooling = header.pooling; // symbols of a row
    this.bitsPerOutput = header.bits_per_output;
    Object.assign(this, { alphabet: symbols, axis: "x" }); // the rows are inputs
    [this.rows, this.T] = arrays.log_null.shape; // the last column has no next output
    this.numOutputs = this.T - 1;
    this.path = header.best_path.map(([t, u]) => [u, t]);
    this.frames = arrays.picture;
    this.values = {
      log_null: this.byColumn(arrays.log_null),
      log_product: this.byColumn(arrays.log_product),
      log_next_output: this.byColumn(arrays.log_next_output),
    };
    this.values.log_fit = this.fits();
    Object.assign(this, { alongTime: "previous outputs", alongSymbols: "inputs" });
    this.intervals();
  }

  // Return an array [rows, columns] column by column; -Infinity where it has no column.
  byColumn({ shape: [rows, columns], values }) {
    const found = new Float32Array(rows * this.T).fill(-Infinity);
    for (let t = 0; t < columns; t++) {
      for (let u = 0; u < rows; u++) found[t * rows + u] = values[u * columns + t];
    }
    return found;
  }

  // Return the log-density of each column's output, less the largest of the column.
  fits() {
    const { rows } = this;
    const found = this.values.log_next_output.slice();
    for (let t = 0; t < this.numOutputs; t++) {
      const column = found.subarray(t * rows, (t + 1) * rows);
      const largest = Math.max(...column);
      for (let u = 0; u < rows; u++) column[u] -= largest;
    }
    return found;
  }

  // Find when each row's symbols are said in the most probable alignment: `target` names those that
  // are said, and `timings` has their first column, their last and the one between.
  intervals() {
    Object.assign(this, { target: [], timings: [], indices: [] });
    for (let u = 0; u < this.rows; u++) {
      const columns = this.path.filter(([, row]) => row === u).map(([t]) => t);
      const [start, end] = [columns[0], columns.at(-1) - 1]; // the last node emits null
      this.indices.push(end < start ? -1 : this.target.length);
      if (end < start) continue;
      this.target.push(this.rowName(u));
      this.timings.push({ start, end, frame: (start + end) / 2 });
    }
  }

  // Convert a column and a row to the paper's node t,u, and back.
  node(t, u) {
    return [u, t];
  }

  place(t, u) {
    return [u, t];
  }

  get words() {
    const { temperature, durations, seed } = this.generation ?? {};
    const drawn = `generated: temperature ${temperature}, ${durations} durations, seed ${seed}`;
    return `${this.symbols.join(" ")} (${this.generation ? drawn : "the recording"})`;
  }

  // Ask for the mixture at a node and the sensitivities of null there.
  ask(t, u) {
    return fetchNode(this.view, ...this.node(t, u));
  }

  // Return the logarithm of a map at a node.
  at(map, t, u) {
    return this.values[this.maps[map].values][t * this.rows + u];
  }

  // Return the log-density of the next output at a node.
  logDensity(t, u) {
    return this.values.log_next_output[t * this.rows + u];
  }

  // Return the sensitivities for the map below, [frames, channels], and for that beside,
  // [K, rows]; a row that pools several symbols has the largest of theirs.
  sensitivities({ inputs, outputs }) {
    const { rows } = this;
    const [length, K] = inputs.shape;
    const values = new Float32Array(K * rows);
    for (let i = 0; i < length; i++) {
      for (let k = 0; k < K; k++) {
        const to = k * rows + Math.floor(i / this.pooling);
        values[to] = Math.max(values[to], Math.abs(inputs.values[i * K + k]));
      }
    }
    return { alongTime: outputs, alongSymbols: { values, shape: [K, rows] } };
  }

  symbolOf(u) {
    return this.alphabet.indexOf(this.names[u]);
  }

  sensitive() {
    return "∅";
  }

  // Return the index among those that are said of the row at the crosshair; -1 if it is not.
  last(u) {
    return this.indices[u];
  }

  // Return the name of row u; of a condition such as speaker=theo, its value.
  rowName(u) {
    return this.names[u].replaceAll(/[^\s=]+=/g, "");
  }

  // Convert a number of outputs to frames, and back.
  frame(t) {
    return this.stacking * t;
  }

  vector(frame) {
    return frame / this.stacking;
  }

  range(map) {
    if (map !== "null") return [-RANGE, 0];
    const lowest = this.values.log_null.reduce((a, b) => Math.min(a, b), 0);
    return [Math.max(-RANGE, lowest), 0];
  }

  image(map, scale) {
    const values = this.values[this.maps[map].values];
    return heatMap(values, this.T, this.rows, this.range(map), scale);
  }

  picture(theme) {
    return greys(this.frames, theme);
  }
}
