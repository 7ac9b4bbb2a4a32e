// The bar graphs at the crosshair: the output distribution, and that of each network alone.

import { write } from "./figure.js";

export const GRAPHS = [
  { name: "output", colour: "blue", words: "output distribution" },
  { name: "transcription", colour: "red", words: "transcription network" },
  { name: "prediction", colour: "green", words: "prediction network" },
];
const LEAST = 21; // pixels, the smallest width of a bar

// Choose the outputs to draw: all, or the most probable ones that fit, in the order of their ids.
export function shown(bars, room) {
  const ids = bars.output.map((_, k) => k);
  const most = Math.max(4, Math.floor(room / LEAST));
  if (ids.length <= most) return ids;
  const strength = (k) => Math.max(...GRAPHS.map(({ name }) => bars[name][k]));
  const strongest = ids.sort((a, b) => strength(b) - strength(a)).slice(0, most);
  return strongest.sort((a, b) => a - b);
}

export function drawBars(context, box, { lattice, node }, theme) {
  const bars = lattice.bars(node.t, node.u);
  const margin = 26; // for the scale
  const [left, width] = [box.x + margin, box.w - margin];
  const ids = shown(bars, width);
  const slot = width / ids.length;
  const isAll = ids.length === lattice.numOutputs;
  const below = isAll ? 18 : 32; // for the symbols, and a note
  const height = (box.h - below) / GRAPHS.length;
  const next = lattice.next(node.u);
  GRAPHS.forEach(({ name, colour, words }, i) => {
    const top = box.y + i * height + 18;
    const h = height - 30;
    const title = { colour: theme[colour], size: 11, weight: 600 };
    write(context, words, left, top - 14, title);
    const after = left + context.measureText(words).width + 6;
    const formula = ["Pr(k|t,u), Eq. 13", "from f alone", "from g alone"][i];
    write(context, formula, after, top - 14, { colour: theme.muted, size: 11 });
    context.fillStyle = theme.line;
    for (const share of [0, 0.5, 1]) context.fillRect(left, top + h * (1 - share) - 0.5, width, 1);
    for (const share of [0, 1]) {
      const scale = { colour: theme.muted, size: 10, align: "right" };
      write(context, String(share), left - 5, top + h * (1 - share), scale);
    }
    ids.forEach((k, j) => {
      const tall = h * bars[name][k];
      context.fillStyle = theme[colour];
      context.fillRect(left + (j + 0.15) * slot, top + h - tall, 0.7 * slot, tall);
    });
  });
  ids.forEach((k, j) => {
    const marked = k === next && k !== 0;
    const [x, y] = [left + (j + 0.5) * slot, box.y + box.h - below + 9];
    write(context, lattice.outputs[k], x, y, {
      colour: marked ? theme.ink : theme.muted,
      weight: marked ? 700 : 400,
      align: "center",
    });
  });
  if (isAll) return;
  const note = `the ${ids.length} most probable of ${lattice.numOutputs} outputs`;
  write(context, note, left, box.y + box.h - 7, { colour: theme.muted, size: 10 });
}
