// The figure: the output lattice above its input, on one time axis, with the sensitivities of the
// node at the crosshair, as in Figure 3 of the paper. `layout` places the parts, `draw` draws them.

import { HEAT, css } from "./colours.js";
import { drawBars } from "./bars.js";
import { drawMixture } from "./mixture.js";

export const FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif';
const NARROW = 720; // pixels; narrower figures have one column
const REST = 570; // pixels of the window's height outside the lattice
const LANES = 3; // rows for the timings of labels
const SCALE_WIDTH = 110; // pixels of the colour scale of sensitivities, with its ends
const OMITTED = "·"; // in place of a name for which there is no room

const clamp = (x, low, high) => Math.min(high, Math.max(low, x));

// Return the rectangle {x, y, w, h} of each part, and the total height: that of the window, or more
// if the rows of the lattice would be too low.
export function layout(width, lattice, windowHeight) {
  const narrow = width < NARROW;
  const axis = (narrow ? 34 : 46) + (lattice.speaks ? 22 : 0); // names of speakers are long
  const left = narrow ? 0 : Math.round(clamp(0.29 * width, 230, 420));
  const [x, w] = [left + axis, Math.max(1, width - left - axis - 8)];
  const highest = narrow ? 380 : clamp(windowHeight - REST, 340, 640);
  const rows = clamp((lattice.speaks ? 36 : 24) * lattice.rows, 200, highest);
  const text = !lattice.speaks && lattice.source !== null;
  let y = 0;
  const down = (h, gap) => {
    const box = { x, y, w, h };
    y += h + gap;
    return box;
  };
  const key = down(32, 6);
  const heat = down(rows, 6);
  const track = down(12 + 15 * LANES, 6);
  const picture = down(text ? 26 : narrow ? 84 : 120, 24);
  const alongTime = down(text ? clamp(4 * 27, 90, 120) : narrow ? 70 : 96, 4);
  const times = down(46, 0);
  const boxes = { narrow, key, heat, track, picture, alongTime, times };
  boxes.axis = { x: left, y: heat.y, w: axis, h: heat.h };
  if (narrow) {
    boxes.bars = { x: 0, y: y + 18, w: Math.max(1, width - 8), h: 290 };
    y += boxes.bars.h + 44;
    boxes.alongSymbols = { x: axis, y: y + 18, w, h: clamp(9 * lattice.rows, 120, 300) };
    y += boxes.alongSymbols.h + 44;
  } else {
    boxes.alongSymbols = { x: 0, y: heat.y, w: left - 6, h: heat.h };
    const top = track.y + 24;
    boxes.bars = { x: 0, y: top, w: left + axis - 26, h: Math.max(250, y - top) };
    y = Math.max(y, boxes.bars.y + boxes.bars.h);
  }
  return { ...boxes, width, height: y };
}

// Return functions from a time t (in transcription vectors) and a number of labels u to the canvas.
export function scales(boxes, viewport) {
  const { heat } = boxes;
  const perVector = heat.w / (viewport.t1 - viewport.t0);
  const perLabel = heat.h / (viewport.u1 - viewport.u0);
  return {
    perVector,
    perLabel,
    x: (t) => heat.x + (t - viewport.t0) * perVector,
    y: (u) => heat.y + heat.h - (u - viewport.u0) * perLabel,
    t: (x) => viewport.t0 + (x - heat.x) / perVector,
    u: (y) => viewport.u0 + (heat.y + heat.h - y) / perLabel,
  };
}

export function contains({ x, y, w, h }, px, py) {
  return px >= x && px < x + w && py >= y && py < y + h;
}

// `scene` has lattice, model, map, scale, viewport, node, detail, cursor and images.
export function draw(context, boxes, scene, theme) {
  context.fillStyle = theme.paper;
  context.fillRect(0, 0, boxes.width, boxes.height);
  context.textBaseline = "middle";
  const place = scales(boxes, scene.viewport);
  drawKey(context, boxes, scene, theme);
  drawHeat(context, boxes, scene, theme);
  const written = {}; // every n-th of these is written
  written.row = drawLabelAxis(context, boxes, scene, theme, place);
  written.label = drawTrack(context, boxes, scene, theme, place);
  written.letter = drawPicture(context, boxes, scene, theme, place);
  drawSensitivityAlongTime(context, boxes, scene, theme);
  drawTimes(context, boxes, scene, theme, place);
  written.row = Math.max(written.row, drawSensitivityAlongSymbols(context, boxes, scene, theme));
  noteThinning(context, boxes.times, written, theme);
  drawPath(context, boxes, scene, theme, place);
  drawCursor(context, boxes, scene, theme, place);
  drawCrosshair(context, boxes, scene, theme, place);
  (scene.lattice.speaks ? drawMixture : drawBars)(context, boxes.bars, scene, theme);
}

export function write(context, text, x, y, { size = 11, colour, align = "left", weight = 400 } = {}) {
  context.font = `${weight} ${size}px ${FONT}`;
  context.fillStyle = colour;
  context.textAlign = align;
  context.fillText(text, x, y);
}

function clipped(context, box, drawing) {
  context.save();
  context.beginPath();
  context.rect(box.x, box.y, box.w, box.h);
  context.clip();
  drawing();
  context.restore();
}

function frame(context, { x, y, w, h }, theme) {
  context.strokeStyle = theme.line;
  context.lineWidth = 1;
  context.strokeRect(x - 0.5, y - 0.5, w + 1, h + 1);
}

// Draw the visible part of an image, without smoothing if it is enlarged.
function drawPart(context, image, box, [sx, sy, sw, sh]) {
  context.imageSmoothingEnabled = sw > 2 * box.w || sh > 2 * box.h;
  context.drawImage(image, sx, sy, sw, sh, box.x, box.y, box.w, box.h);
}

function drawKey(context, { key }, { lattice, map, scale }, theme) {
  const [low, high] = lattice.range(map);
  const { words, symbol, equation } = lattice.maps[map];
  write(context, words, key.x, key.y + 7, { colour: theme.ink, size: 12, weight: 600 });
  const name = scale === "log" ? `ln ${symbol}` : symbol;
  const source = equation ? `, Eq. ${equation}` : "";
  write(context, `${name}${source}`, key.x, key.y + 24, { colour: theme.muted, size: 11 });
  const ends = scale === "log" ? [low, high].map((x) => decimal(x, 0)) : ["0", power(high)];
  const length = Math.min(150, 0.3 * key.w);
  const x = key.x + key.w - length;
  for (let i = 0; i < length; i++) {
    context.fillStyle = css(HEAT, i / (length - 1));
    context.fillRect(x + i, key.y + 3, 1.5, 9);
  }
  const small = { colour: theme.muted, size: 10 };
  write(context, ends[0], x, key.y + 24, small);
  write(context, ends[1], x + length, key.y + 24, { ...small, align: "right" });
}

// Format a number with a minus sign, not a hyphen.
export function decimal(x, digits) {
  return Number.isFinite(x) ? x.toFixed(digits).replace("-", "−") : "−∞";
}

// Format e to the power of x.
export function power(x) {
  const tens = Math.floor(x / Math.LN10);
  if (x === -Infinity) return "0";
  if (tens >= -3) return Math.exp(x).toPrecision(3);
  return `${Math.exp(x - tens * Math.LN10).toFixed(2)}·10${superscript(tens)}`;
}

function superscript(number) {
  return String(number).replace(/./g, (c) => (c === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[c]));
}

function drawHeat(context, { heat }, { images, viewport }, theme) {
  const { t0, t1, u0, u1, rows } = viewport;
  drawPart(context, images.heat, heat, [t0, rows - u1, t1 - t0, u1 - u0]);
  frame(context, heat, theme);
}

function drawLabelAxis(context, { axis, heat }, { lattice, node, viewport }, theme, place) {
  const every = Math.ceil(11 / place.perLabel);
  const x = axis.x + axis.w - 6;
  write(context, lattice.axis, x, axis.y - 14, { align: "right", colour: theme.muted });
  for (let u = Math.max(0, Math.floor(viewport.u0)); u < Math.min(lattice.rows, viewport.u1); u++) {
    const y = place.y(u + 0.5);
    const here = u === node.u;
    if (y < heat.y || y > heat.y + heat.h) continue;
    const omitted = !here && (u % every || Math.abs(u - node.u) * place.perLabel < 11);
    const options = { align: "right", size: here ? 12 : 11, weight: here ? 700 : 400 };
    const text = omitted ? OMITTED : lattice.rowName(u);
    write(context, text, x, y, { ...options, colour: here ? theme.ink : theme.muted });
  }
  return every;
}

// Say what is thinned.
function noteThinning(context, times, written, theme) {
  const thinned = Object.entries(written).filter(([, every]) => every > 1);
  if (!thinned.length) return;
  const parts = thinned.map(([what, every]) => `every ${ordinal(every)} ${what}`);
  const text = `Named: ${parts.join(", ")}. Zoom in for all.`;
  write(context, text, times.x, times.y + 41, { colour: theme.muted, size: 10 });
}

function ordinal(n) {
  const ending = n % 100 > 10 && n % 100 < 14 ? "th" : (["th", "st", "nd", "rd"][n % 10] ?? "th");
  return `${n}${ending}`;
}

// Draw the timing of each label: a bar from the 5 % to the 95 % quantile, and a mark at the peak.
function drawTrack(context, { track }, { lattice, viewport, node }, theme, place) {
  frame(context, track, theme);
  const here = lattice.last(node.u);
  const { every, named } = labelsThatFit(context, lattice, here, place);
  clipped(context, track, () => {
    const lane = (track.h - 4) / LANES;
    lattice.timings.forEach(({ start, frame: peak, end }, i) => {
      if (end + 1 < viewport.t0 || start > viewport.t1) return;
      const y = track.y + 2 + laneOf(i, every) * lane;
      const isHere = i === here;
      context.fillStyle = isHere ? theme.ink : theme.muted;
      const [from, to] = [place.x(start), place.x(end + 1)];
      context.globalAlpha = isHere ? 1 : 0.55;
      context.fillRect(from, y + lane - 4, Math.max(2, to - from), 2);
      context.globalAlpha = 1;
      const options = { align: "center", weight: isHere ? 700 : 400, colour: theme.ink };
      let middle = place.x(peak + 0.5);
      if (lattice.speaks) middle = insideOf(context, track, lattice.target[i], from, to);
      else context.fillRect(middle - 1, y + lane - 7, 2, 7);
      if (named.has(i)) write(context, lattice.target[i], middle, y + lane / 2 - 2.5, options);
    });
  });
  return every;
}

// Return the middle of the visible part of a strip, or the nearest place with room for its name.
function insideOf(context, { x, w }, name, from, to) {
  context.font = `700 11px ${FONT}`;
  const half = context.measureText(name).width / 2 + 2;
  const middle = (Math.max(from, x) + Math.min(to, x + w)) / 2;
  return clamp(middle, x + half, x + w - half);
}

const laneOf = (i, every) => Math.floor(i / every) % LANES;

// Choose the labels to write: every n-th, with the smallest n for which none overlap in their lanes,
// and label `here`, that of the crosshair, which replaces those it touches.
export function labelsThatFit(context, { target, timings }, here, place) {
  context.font = `700 11px ${FONT}`;
  const ends = timings.map(({ frame: peak }, i) => {
    const half = context.measureText(target[i]).width / 2 + 1;
    return [place.x(peak + 0.5) - half, place.x(peak + 0.5) + half];
  });
  const touch = (i, j) => ends[i][0] < ends[j][1] && ends[j][0] < ends[i][1];
  const fit = (every) => {
    for (let i = every * LANES; i < target.length; i += every) {
      if (touch(i, i - every * LANES)) return false;
    }
    return true;
  };
  let every = 1;
  while (!fit(every)) every++;
  const named = new Set();
  for (let i = 0; i < target.length; i++) {
    const hidden = here >= 0 && laneOf(i, every) === laneOf(here, every) && touch(i, here);
    if (i === here || (i % every === 0 && !hidden)) named.add(i);
  }
  return { every, named };
}

function drawPicture(context, { picture }, { lattice, images, viewport, model, node }, theme, place) {
  frame(context, picture, theme);
  if (images.picture !== null) {
    const part = framesInView(lattice, viewport, images.picture);
    clipped(context, picture, () => drawPart(context, images.picture, picture, part));
    return 1;
  }
  // Write every n-th symbol, as many as fit; at the crosshair its own symbol replaces its neighbours.
  const [size, n] = [14, model.frames_per_vector];
  context.font = `700 ${size}px ${FONT}`;
  const widest = Math.max(...lattice.source.map((symbol) => context.measureText(symbol).width));
  const least = ((widest + 2) * n) / place.perVector; // symbols between two that are written
  const every = Math.ceil(least);
  const first = lattice.frame(node.t); // of the symbols at the crosshair
  clipped(context, picture, () => {
    lattice.source.forEach((symbol, i) => {
      const here = i >= first && i < first + n;
      const apart = Math.min(Math.abs(i - first), Math.abs(i - first - n + 1));
      const options = { size, align: "center", weight: here ? 700 : 400, colour: theme.ink };
      const omitted = here ? (i - first) % every : i % every || apart < least;
      if (omitted) options.colour = theme.muted;
      const text = omitted ? OMITTED : symbol;
      write(context, text, place.x(lattice.vector(i + 0.5)), picture.y + picture.h / 2 + 1, options);
    });
  });
  return every;
}

// Return the rectangle of an image of frames that is in view: x, y, width and height.
function framesInView(lattice, { t0, t1 }, image) {
  const from = lattice.frame(t0);
  return [from, 0, lattice.frame(t1) - from, image.height];
}

function drawSensitivityAlongTime(context, { alongTime: box }, scene, theme) {
  const { images, viewport, lattice } = scene;
  sensitivityTitle(context, lattice.alongTime, box, box.w - SCALE_WIDTH, scene, theme);
  drawSensitivityKey(context, box, scene, theme);
  context.fillStyle = css(HEAT, 0);
  context.fillRect(box.x, box.y, box.w, box.h);
  if (images.alongTime) {
    const part = framesInView(lattice, viewport, images.alongTime);
    clipped(context, box, () => drawPart(context, images.alongTime, box, part));
  }
  frame(context, box, theme);
}

function drawSensitivityAlongSymbols(context, { alongSymbols: box, narrow }, scene, theme) {
  const { images, lattice, viewport, node } = scene;
  sensitivityTitle(context, lattice.alongSymbols, box, box.w, scene, theme);
  context.fillStyle = css(HEAT, 0);
  context.fillRect(box.x, box.y, box.w, box.h);
  const { u0, u1 } = narrow ? { u0: 0, u1: lattice.rows } : viewport;
  const { alphabet } = lattice;
  const row = box.h / (u1 - u0);
  const column = box.w / alphabet.length;
  const middle = (u) => box.y + box.h - (u + 0.5 - u0) * row;
  clipped(context, box, () => {
    if (images.alongSymbols) {
      const part = [0, lattice.rows - u1, images.alongSymbols.width, u1 - u0];
      drawPart(context, images.alongSymbols, box, part);
    }
    // Mark the symbol of each row among all possible ones.
    context.fillStyle = "#ffffff";
    for (let u = 0; u < lattice.rows; u++) {
      const k = lattice.symbolOf(u, node.u);
      if (k < 0) continue;
      const x = box.x + (k + 0.5) * column;
      context.beginPath();
      context.arc(x, middle(u), Math.min(2, row / 3, column / 3), 0, 2 * Math.PI);
      context.fill();
    }
  });
  frame(context, box, theme);
  const below = box.y + box.h + 9;
  const small = { colour: theme.muted, size: 10 };
  write(context, alphabet[0], box.x, below, small);
  write(context, alphabet.at(-1), box.x + box.w, below, { ...small, align: "right" });
  if (!narrow) return 1; // the rows are those of the map
  const every = Math.ceil(11 / row);
  for (let u = 0; u < lattice.rows; u++) {
    const colour = u === node.u ? theme.ink : theme.muted;
    const text = u % every ? OMITTED : lattice.rowName(u);
    write(context, text, box.x - 6, middle(u), { align: "right", colour });
  }
  return every;
}

// Write a title of at most `room` pixels; name the output, if there is room for it.
function sensitivityTitle(context, what, box, room, { lattice, node }, theme) {
  const whole = `sensitivity of Pr(${lattice.sensitive(node.u)}|t,u) to the ${what}`;
  context.font = `400 11px ${FONT}`;
  const text = context.measureText(whole).width < room ? whole : `sensitivity to the ${what}`;
  write(context, text, box.x, box.y - 10, { colour: theme.muted, size: 11 });
}

// Draw the colour scale of both sensitivities: shares of the largest value of each.
function drawSensitivityKey(context, { x, y, w }, { model }, theme) {
  const [small, length] = [{ colour: theme.muted, size: 10 }, 54];
  const right = x + w - 8;
  write(context, "1", x + w, y - 10, { ...small, align: "right" });
  for (let i = 0; i < length; i++) {
    context.fillStyle = css(HEAT, i / (length - 1));
    context.fillRect(right - length + i - 2, y - 14, 1.5, 7);
  }
  const least = String(10 ** -model.decades);
  write(context, least, right - length - 6, y - 10, { ...small, align: "right" });
}

const STEPS = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000];

function drawTimes(context, { times }, { viewport, model, lattice }, theme, place) {
  const perFrame = model.seconds_per_frame ?? 1;
  const perVector = perFrame * model.frames_per_vector;
  const inSeconds = model.seconds_per_frame !== null;
  const wanted = ((inSeconds ? 64 : 24) / place.perVector) * perVector;
  const step = STEPS.find((s) => s >= wanted && (inSeconds || s >= 1)) ?? wanted;
  const digits = Math.max(0, Math.ceil(-Math.log10(step) - 1e-9));
  const [from, to] = [viewport.t0, viewport.t1].map((t) => lattice.frame(t) * perFrame);
  for (let i = Math.ceil(Math.max(0, from) / step - 1e-9); i * step <= to; i++) {
    const x = place.x(lattice.vector((i * step) / perFrame) + (inSeconds ? 0 : 0.5));
    if (x > times.x + times.w + 1) break;
    context.fillStyle = theme.line;
    context.fillRect(x - 0.5, times.y, 1, 5);
    const text = inSeconds ? `${(i * step).toFixed(digits)} s` : `${i * step}`;
    write(context, text, clamp(x, times.x + 10, times.x + times.w - 12), times.y + 12, {
      colour: theme.muted,
      size: 10,
      align: "center",
    });
  }
  const unit = inSeconds ? "time" : "frame t";
  const x = times.x + times.w / 2;
  write(context, unit, x, times.y + 27, { colour: theme.muted, size: 11, align: "center" });
}

function drawPath(context, { heat }, { lattice }, theme, place) {
  clipped(context, heat, () => {
    context.beginPath();
    lattice.path.forEach(([t, u]) => context.lineTo(place.x(t + 0.5), place.y(u + 0.5)));
    context.lineJoin = "round";
    const width = place.perLabel < 5 ? 1 : 2; // no wider than a node
    context.strokeStyle = "rgba(0, 0, 0, 0.6)";
    context.lineWidth = 2 * width;
    context.stroke();
    context.strokeStyle = theme.path;
    context.lineWidth = width;
    context.stroke();
  });
}

// Draw the time of the player or the frame of the search, with a dot on the best path.
function drawCursor(context, boxes, { cursor, lattice }, theme, place) {
  if (cursor === null) return;
  const { heat, alongTime } = boxes;
  const x = place.x(cursor);
  if (x < heat.x - 1 || x > heat.x + heat.w + 1) return;
  context.fillStyle = theme.accent;
  context.fillRect(x - 1, heat.y, 2, alongTime.y + alongTime.h - heat.y);
  const t = Math.min(lattice.T - 1, Math.floor(cursor));
  const last = lattice.path.findLast(([time]) => time <= t);
  if (!last) return;
  clipped(context, heat, () => {
    context.beginPath();
    context.arc(x, place.y(last[1] + 0.5), 5.5, 0, 2 * Math.PI);
    context.fill();
    context.strokeStyle = "#ffffff";
    context.lineWidth = 2;
    context.stroke();
  });
}

function drawCrosshair(context, boxes, { node, held }, theme, place) {
  const { heat, alongTime, picture, alongSymbols, narrow } = boxes;
  const [x, y] = [place.x(node.t + 0.5), place.y(node.u + 0.5)];
  const across = (colour, x0, y0, w, h) => {
    context.fillStyle = colour;
    context.fillRect(x0, y0, w, h);
  };
  const inView = x >= heat.x && x <= heat.x + heat.w;
  if (inView) {
    across(theme.ink, x - 0.5, heat.y + heat.h, 1, picture.y + picture.h - heat.y - heat.h);
    across("rgba(255, 255, 255, 0.7)", x - 0.5, alongTime.y, 1, alongTime.h);
  }
  clipped(context, heat, () => {
    for (const [colour, extra] of [["rgba(0, 0, 0, 0.45)", 1], ["rgba(255, 255, 255, 0.9)", 0]]) {
      across(colour, x - 0.5 - extra, heat.y, 1 + 2 * extra, heat.h);
      across(colour, heat.x, y - 0.5 - extra, heat.w, 1 + 2 * extra);
    }
    context.lineWidth = 1.5;
    context.strokeStyle = "#ffffff";
    context.fillStyle = held ? theme.accent : "rgba(0, 0, 0, 0.5)";
    context.beginPath();
    context.arc(x, y, 5, 0, 2 * Math.PI);
    context.fill();
    context.stroke();
  });
  if (!narrow && y >= alongSymbols.y && y <= alongSymbols.y + alongSymbols.h) {
    across("rgba(255, 255, 255, 0.7)", alongSymbols.x, y - 0.5, alongSymbols.w, 1);
  }
}
