// The panel of speech: the recording of an example, or speech that is generated; and the words about
// what the figure shows of it.

import { components } from "./mixture.js";
import { decimal, power } from "./figure.js";

const $ = (id) => document.getElementById(id);
const MOST_SYMBOLS = 12; // of an input in a sentence

export class SaidPanel {
  // `show(generation)` shows generated speech, or, of null, the recording.
  constructor(model, show) {
    this.model = model;
    this.choose(model.generation);
    $("said-form").addEventListener("submit", (event) => {
      event.preventDefault();
      show(this.generation());
    });
    $("recording").addEventListener("click", () => show(null));
    const voices = Object.entries(model.conditions).flatMap(([name, values]) =>
      values.map((value) => `${name}=${value}`),
    );
    $("text").placeholder = `${voices[0] ?? ""} ${model.symbols[0]}`.trim();
    $("voices").textContent = voices.length ? `The model has ${voices.join(", ")}.` : "";
  }

  // Return the options in the form. The server refuses those that are not numbers.
  generation() {
    const number = (id) => ($(id).value === "" ? null : Number($(id).value));
    return { temperature: number("temperature"), durations: $("durations").value, seed: number("seed") };
  }

  setInput({ name, has_recording: isRecorded }) {
    $("said-name").textContent = name;
    $("recording").hidden = !isRecorded;
  }

  // Return what is shown first of an input.
  first({ has_recording: isRecorded }) {
    return isRecorded ? null : this.generation();
  }

  // Fill in the form.
  choose(generation) {
    $("recording").setAttribute("aria-pressed", String(generation === null));
    if (generation === null) return;
    for (const [name, value] of Object.entries(generation)) $(name).value = value;
  }

  // Say in sentences what the map shows.
  seen({ symbols, generation, bitsPerOutput, numOutputs }, map) {
    const few = symbols.slice(0, MOST_SYMBOLS).join(" ");
    const input = symbols.length > MOST_SYMBOLS ? `${few} …` : few;
    const what = generation === null ? "the recording" : "generated sound";
    const bright = {
      product: "The bright band shows when each symbol is said.",
      null: "At bright nodes the network is likely to go on to the next symbol.",
      fit: "In each column, the next output is likely at bright symbols.",
    }[map];
    return [
      `Reading ${input} from bottom to top, the network emits ${what} from left to right,`,
      `in ${numOutputs} outputs of ${this.milliseconds} ms.`,
      bright,
      `An output takes ${decimal(bitsPerOutput, 1)} bits.`,
    ].join(" ");
  }

  get milliseconds() {
    return Math.round(1000 * this.model.seconds_per_frame * this.model.frames_per_vector);
  }

  // Write the numbers of a node, of column t and row u.
  readout(lattice, t, u, isHeld) {
    const seconds = lattice.frame(t) * this.model.seconds_per_frame;
    const [T, U] = lattice.node(lattice.T - 1, lattice.rows - 1);
    const parts = [
      `Node ${lattice.node(t, u).join(",")} (${seconds.toFixed(2)} s) of 0,0 to ${T},${U},`,
      `symbol ${lattice.names[u]}: null ${Math.exp(lattice.at("null", t, u)).toFixed(3)}.`,
    ];
    const logDensity = lattice.logDensity(t, u);
    if (t === lattice.numOutputs) parts.push("No output follows.");
    else parts.push(`The next output takes ${bits(logDensity)} bits here.`);
    const passes = power(Math.min(0, lattice.at("product", t, u)));
    parts.push(`The alignment passes here with probability ${passes}.`);
    if (isHeld) parts.push("The crosshair is locked.");
    return parts.join(" ");
  }

  // List the components of the mixture at the crosshair.
  list({ header }) {
    const rows = components(header).map(({ m, weight, logDensity, share }) => {
      const row = document.createElement("tr");
      const head = Object.assign(document.createElement("th"), { textContent: m + 1, scope: "row" });
      row.append(head);
      const cells = [power(Math.log(weight)), "", ""];
      if (logDensity !== null) cells.splice(1, 2, bits(logDensity), power(Math.log(share)));
      for (const text of cells) {
        row.append(Object.assign(document.createElement("td"), { textContent: text }));
      }
      return row;
    });
    $("component-rows").replaceChildren(...rows);
  }
}

// Write the bits of a log-density, which are negative where it is above one.
function bits(logDensity) {
  return decimal(-logDensity / Math.LN2, 1);
}
