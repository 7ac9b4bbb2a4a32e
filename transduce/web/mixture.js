// The mixture of Gaussians at the crosshair: null and the components as bars, and their means beside
// the next output as curves.

import { write } from "./figure.js";

const COLOURS = ["blue", "red", "green", "muted"]; // of the most probable components

// Return the components with their weights, the most probable first; `logDensity` is of the next
// output by one, and `share` the probability that the output is its; both null after the last.
export function components({ weights, log_densities: densities }) {
  const joint = densities.map((density, m) => density + Math.log(weights[m]));
  const largest = Math.max(...joint);
  const total = joint.reduce((sum, x) => sum + Math.exp(x - largest), 0);
  return weights
    .map((weight, m) => ({
      m,
      weight,
      logDensity: densities[m] ?? null,
      share: densities.length ? Math.exp(joint[m] - largest) / total : null,
    }))
    .sort((a, b) => b.weight - a.weight);
}

export function drawMixture(context, box, { lattice, detail, model }, theme) {
  if (detail === null) return;
  const margin = 26; // for the scale
  const inner = { x: box.x + margin, w: box.w - margin };
  const shown = components(detail.header).slice(0, COLOURS.length);
  const height = Math.max(96, 0.36 * box.h);
  drawShares(context, { ...inner, y: box.y, h: height }, detail.header, shown, theme);
  const curves = { ...inner, y: box.y + height + 14, h: box.h - height - 14 };
  drawCurves(context, curves, detail.arrays, shown, { lattice, model }, theme);
}

// Draw the probability of null, and of each component, which together are 1.
function drawShares(context, { x, y, w, h }, { null: null_, weights }, shown, theme) {
  const title = { colour: theme.ink, size: 11, weight: 600 };
  write(context, "null, or a component", x, y + 4, title);
  const after = x + context.measureText("null, or a component").width + 6;
  write(context, "at the crosshair", after, y + 4, { colour: theme.muted, size: 11 });
  const [top, tall] = [y + 18, h - 36];
  context.fillStyle = theme.line;
  for (const share of [0, 0.5, 1]) context.fillRect(x, top + tall * (1 - share) - 0.5, w, 1);
  for (const share of [0, 1]) {
    const scale = { colour: theme.muted, size: 10, align: "right" };
    write(context, String(share), x - 5, top + tall * (1 - share), scale);
  }
  const bars = [{ name: "∅", share: null_, colour: theme.ink }];
  shown.forEach(({ m, weight }, i) => {
    bars.push({ name: `${m + 1}`, share: (1 - null_) * weight, colour: theme[COLOURS[i]] });
  });
  const rest = weights.length - shown.length;
  const slot = w / bars.length;
  bars.forEach(({ name, share, colour }, i) => {
    context.fillStyle = colour;
    context.fillRect(x + (i + 0.15) * slot, top + tall * (1 - share), 0.7 * slot, tall * share);
    const options = { colour: theme.muted, align: "center" };
    write(context, `${name}  ${share.toFixed(2)}`, x + (i + 0.5) * slot, top + tall + 11, options);
  });
  if (!rest) return;
  const note = { colour: theme.muted, size: 10, align: "right" };
  write(context, `and ${rest} more`, x + w, y + 4, note);
}

// Draw the next output and the means of the components over the mel channels, frame beside frame.
function drawCurves(context, { x, y, w, h }, arrays, shown, { lattice, model }, theme) {
  const { means, deviations, output } = arrays;
  const D = means.shape[1];
  const channels = D / model.frames_per_vector;
  const row = ({ values }, m) => values.subarray(m * D, (m + 1) * D);
  const curves = shown.map(({ m }) => row(means, m));
  const band = row(deviations, shown[0].m);
  const all = [...output.values, ...curves.flatMap((curve) => [...curve])];
  curves[0].forEach((mean, d) => all.push(mean - band[d], mean + band[d]));
  const [low, high] = [Math.min(...all), Math.max(...all)];
  const [top, tall] = [y + 18, h - 36];
  const across = (d) => x + ((d + 0.5) / D) * w;
  const up = (value) => top + tall * (1 - (value - low) / (high - low || 1));
  const follows = output.values.length > 0;
  const title = follows ? "next output" : "no output follows";
  write(context, title, x, y + 4, { colour: theme.ink, size: 11, weight: 600 });
  const after = x + context.measureText(title).width + 6;
  write(context, "and the means, ln of power", after, y + 4, { colour: theme.muted, size: 11 });
  context.fillStyle = theme.line;
  for (let i = 0; i <= model.frames_per_vector; i++) {
    context.fillRect(x + (i * w) / model.frames_per_vector - 0.5, top, 1, tall);
  }
  for (const end of [0, 1]) context.fillRect(x, top + end * tall - 0.5, w, 1);
  const scale = { colour: theme.muted, size: 10, align: "right" };
  for (const value of [low, high]) write(context, value.toFixed(0), x - 5, up(value), scale);
  // The most probable component within one deviation.
  context.globalAlpha = 0.16;
  context.fillStyle = theme[COLOURS[0]];
  context.beginPath();
  for (let d = 0; d < D; d++) context.lineTo(across(d), up(curves[0][d] + band[d]));
  for (let d = D - 1; d >= 0; d--) context.lineTo(across(d), up(curves[0][d] - band[d]));
  context.fill();
  context.globalAlpha = 1;
  const line = (values, colour, width) => {
    context.strokeStyle = colour;
    context.lineWidth = width;
    for (let first = 0; first < D; first += channels) {
      context.beginPath();
      for (let d = first; d < first + channels; d++) context.lineTo(across(d), up(values[d]));
      context.stroke();
    }
  };
  curves.forEach((curve, i) => line(curve, theme[COLOURS[i]], 1.2));
  if (follows) line(output.values, theme.ink, 2);
  for (let i = 0; i < model.frames_per_vector; i++) {
    const words = model.frames_per_vector > 1 ? `frame ${i + 1}: mel channels` : "mel channels";
    const middle = x + ((i + 0.5) * w) / model.frames_per_vector;
    const options = { colour: theme.muted, size: 10, align: "center" };
    write(context, words, middle, top + tall + 10, options);
  }
}
