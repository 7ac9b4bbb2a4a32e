// The alignment of a known text: its words and phones over the spectrogram. A click plays a word or
// a phone; boundaries are dragged, or moved with the arrow keys.

import { Problem, fetchAlignment } from "./api.js";
import { theme } from "./colours.js";
import { write } from "./figure.js";
import { download } from "./files.js";
import { StretchPlayer } from "./sound.js";
import { STEP, Tiers } from "./tiers.js";

const $ = (id) => document.getElementById(id);
const PICTURE = 120; // height of the spectrogram in pixels
const AXIS = 20; // height of the axis of time
const READABLE = 240; // pixels for a second: most phones have room for their names
const CLOSEST = 2000;
const FAR = 80; // with fewer pixels for a second, phones have no room for names
const STILL = 2; // pixels that the pointer may move in a click
const MOST_LISTED = 6; // words in a sentence

export class AlignmentPanel {
  // `callbacks` has report(problem), and playing(), called before a stretch is played.
  constructor(model, callbacks) {
    Object.assign(this, { model, callbacks, opened: null, tiers: null });
    Object.assign(this, { dragged: null, scale: READABLE, waiting: null, running: null });
    this.player = new StretchPlayer();
    this.canvas = document.createElement("canvas");
    $("alignment-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.run();
    });
    $("spoken").addEventListener("keydown", (event) => {
      if (event.key !== "Enter") return;
      event.preventDefault();
      this.run();
    });
    $("closer").addEventListener("click", () => this.zoom(1.5));
    $("farther").addEventListener("click", () => this.zoom(1 / 1.5));
    $("whole").addEventListener("click", () => this.setScale(0));
    $("save-textgrid").addEventListener("click", () => this.save());
    const tiers = $("tiers");
    tiers.addEventListener("click", ({ target }) => this.clicked(target));
    tiers.addEventListener("focusin", ({ target }) => this.focused(target));
    tiers.addEventListener("keydown", (event) => this.typed(event));
    tiers.addEventListener("pointerdown", (event) => this.pressed(event));
    tiers.addEventListener("pointermove", (event) => this.pulled(event));
    for (const end of ["pointerup", "pointercancel"]) {
      tiers.addEventListener(end, () => (this.dragged = null));
    }
    tiers.addEventListener("scroll", () => this.redraw());
    new ResizeObserver(() => this.tiers && this.setScale(this.scale)).observe(tiers);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.repaint());
  }

  // Show the panel for an input and a lattice of it, which has its spectrogram.
  setInput(opened, lattice) {
    $("alignment").hidden = !(this.model.aligns && opened.has_sound);
    this.lattice = lattice;
    if (opened.input === this.opened?.input) return;
    Object.assign(this, { opened, tiers: null, running: null });
    this.player.setInput(opened.input);
    $("alignment-name").textContent = opened.name;
    $("aligned").hidden = true;
    this.showRunning();
  }

  async run() {
    if (this.running) return;
    const run = (this.running = {});
    this.showRunning();
    try {
      const found = await fetchAlignment(this.opened.input, $("spoken").value);
      if (this.running === run) this.show(new Tiers(found));
    } catch (error) {
      if (this.running === run) this.callbacks.report(error);
    } finally {
      if (this.running === run) this.running = null;
      this.showRunning();
    }
  }

  showRunning() {
    $("alignment-form").querySelector("button").disabled = Boolean(this.running);
    $("alignment-state").textContent = this.running ? "Aligning …" : "";
  }

  show(tiers) {
    this.player.stop();
    Object.assign(this, { tiers, dragged: null });
    const blocks = [
      ...tiers.words.map((word) => this.block(word, "word", word.text)),
      ...tiers.phones.map((phone) => this.block(phone, "phone", phone.symbol)),
    ];
    const handles = tiers.boundaries.map((boundary) => this.handle(boundary));
    const bands = element("div", "bands"); // one layer, so that bands that overlap are as light
    bands.append(...tiers.boundaries.map(({ band }) => band));
    $("tiers-content").replaceChildren(this.canvas, ...blocks, bands, ...handles);
    if (tiers.boundaries.length) tiers.boundaries[0].handle.tabIndex = 0;
    $("boundary").textContent = "";
    $("fits").textContent = describeFit(tiers);
    $("aligned").hidden = false;
    $("tiers").scrollLeft = 0;
    this.setScale(READABLE);
    this.repaint();
  }

  // --- Words, phones and boundaries -------------------------------------------------------------

  block(one, kind, text) {
    const block = element("button", kind);
    Object.assign(block, { type: "button", tabIndex: -1 });
    block.append(element("span", "", text));
    if (one.fits === false) {
      block.classList.add("misfit");
      block.append(element("small", "", saidInstead(one)));
    }
    block.interval = one;
    one.block = block;
    this.placeBlock(one);
    return block;
  }

  placeBlock(one) {
    const [start, end] = [one.start.time, one.end.time];
    this.place(one.block, start, end);
    const lines = [
      `${one.text ?? one.symbol}, ${start.toFixed(3)} to ${end.toFixed(3)} s`,
      `confidence ${one.confidence.toFixed(2)}`,
    ];
    if (one.fits === false) lines.push(`does not fit: ${saidInstead(one)}`);
    one.block.title = lines.join("\n");
  }

  // Make the handle of a boundary, and its band from the 5 % to the 95 % quantile.
  handle(boundary) {
    const band = element("div", "band");
    const handle = element("div", boundary.isOfWord ? "edge of-word" : "edge");
    handle.tabIndex = -1;
    handle.setAttribute("role", "slider");
    handle.setAttribute("aria-label", `Boundary between ${neighbours(boundary).join(" and ")}`);
    Object.assign(boundary, { handle, band });
    handle.boundary = boundary;
    this.placeBoundary(boundary);
    return handle;
  }

  placeBoundary(boundary) {
    const { time, bounds, handle, band } = boundary;
    this.place(handle, time);
    band.hidden = bounds === null;
    if (bounds !== null) this.place(band, ...bounds);
    handle.classList.toggle("moved", bounds === null);
    handle.setAttribute("aria-valuenow", time.toFixed(3));
    handle.setAttribute("aria-valuemin", "0");
    handle.setAttribute("aria-valuemax", this.tiers.seconds.toFixed(3));
    handle.setAttribute("aria-valuetext", `${time.toFixed(3)} seconds`);
  }

  // Place an element at a time, or from one time to another.
  place(one, start, end = null) {
    const share = (time) => `${(100 * time) / this.tiers.seconds}%`;
    one.style.left = share(start);
    if (end !== null) one.style.width = share(end - start);
  }

  // Move a boundary with `change`, and what touches it.
  moved(boundary, change) {
    change();
    this.placeBoundary(boundary);
    for (const phone of [boundary.before, boundary.after]) {
      if (phone === null) continue;
      this.placeBlock(phone);
      this.placeBlock(phone.word);
    }
    this.describe(boundary);
  }

  describe(boundary) {
    const { time, bounds, aligned } = boundary;
    const range = bounds?.map((one) => one.toFixed(3)).join(" to ");
    const more = bounds ? `90 %: ${range} s` : `moved from ${aligned.time.toFixed(3)} s`;
    const between = neighbours(boundary).join(" | ");
    $("boundary").textContent = `${between} at ${time.toFixed(3)} s (${more})`;
  }

  // --- Pointer and keys -------------------------------------------------------------------------

  clicked(target) {
    const block = target.closest("button");
    if (block !== null) this.play(block.interval.start.time, block.interval.end.time, block);
  }

  // Keep one boundary in the order of the Tab key, the one that had the focus last.
  focused({ boundary }) {
    if (!boundary) return;
    for (const one of this.tiers.boundaries) one.handle.tabIndex = one === boundary ? 0 : -1;
    this.describe(boundary);
  }

  pressed(event) {
    const { boundary } = event.target;
    if (!boundary || event.button !== 0) return;
    event.target.setPointerCapture(event.pointerId);
    const apart = this.timeAt(event) - boundary.time;
    this.dragged = { boundary, apart, from: event.clientX, isMoving: false };
  }

  pulled(event) {
    if (this.dragged === null) return;
    const { boundary, apart, from } = this.dragged;
    this.dragged.isMoving ||= Math.abs(event.clientX - from) > STILL;
    if (!this.dragged.isMoving) return;
    this.moved(boundary, () => this.tiers.move(boundary, this.timeAt(event) - apart));
  }

  timeAt({ clientX }) {
    const { left, width } = $("tiers-content").getBoundingClientRect();
    return ((clientX - left) / width) * this.tiers.seconds;
  }

  typed(event) {
    const { boundary } = event.target;
    if (!boundary || event.ctrlKey || event.metaKey || event.altKey) return;
    const { tiers } = this;
    const step = (direction) => () => tiers.move(boundary, boundary.time + direction * STEP);
    const changes = {
      ArrowLeft: step(-1),
      ArrowRight: step(1),
      Escape: () => tiers.restore(boundary),
    };
    const others = {
      ArrowUp: () => tiers.boundaries[boundary.index - 1]?.handle.focus(),
      ArrowDown: () => tiers.boundaries[boundary.index + 1]?.handle.focus(),
      " ": () => this.playAround(boundary),
    };
    if (event.key in changes) {
      this.dragged = null;
      this.moved(boundary, changes[event.key]);
    } else if (event.key in others) others[event.key]();
    else return;
    event.preventDefault();
  }

  // --- Sound ------------------------------------------------------------------------------------

  // Play the phones on both sides of a boundary.
  playAround({ before, after }) {
    const [first, last] = [before ?? after, after ?? before];
    this.play(first.start.time, last.end.time, last.block);
  }

  async play(from, to, block) {
    this.callbacks.playing();
    const turn = (this.turn = {});
    const stopped = () => this.turn === turn && block.classList.remove("playing");
    try {
      $("tiers").querySelector(".playing")?.classList.remove("playing");
      block.classList.add("playing");
      await this.player.play(from, to, stopped);
    } catch (error) {
      stopped();
      const isUnplayable = error instanceof DOMException;
      const problem = new Problem("This browser cannot play the sound.");
      this.callbacks.report(isUnplayable ? problem : error);
    }
  }

  // --- The spectrogram --------------------------------------------------------------------------

  zoom(factor) {
    this.setScale(this.scale * factor);
  }

  // Set the pixels for a second, 0 for the whole sound, and keep the middle of the view in place; a
  // view that begins with the sound still does.
  setScale(scale) {
    const tiers = $("tiers");
    const [width, { seconds }] = [tiers.clientWidth, this.tiers];
    if (width === 0) return; // the panel is hidden
    const middle = (tiers.scrollLeft + width / 2) / $("tiers-content").clientWidth;
    const least = width / seconds;
    this.scale = Math.max(least, Math.min(Math.max(least, CLOSEST), scale));
    $("tiers-content").style.width = `${this.scale * seconds}px`;
    tiers.classList.toggle("far", this.scale < FAR);
    if (tiers.scrollLeft > 0) tiers.scrollLeft = middle * this.scale * seconds - width / 2;
    this.redraw();
  }

  repaint() {
    if (this.tiers === null) return;
    this.image = this.lattice.picture(theme());
    this.redraw();
  }

  redraw() {
    if (this.tiers === null || this.waiting) return;
    this.waiting = requestAnimationFrame(() => {
      this.waiting = null;
      if (this.tiers !== null) this.draw();
    });
  }

  // Draw the part that is in view.
  draw() {
    const { canvas, scale } = this;
    const { clientWidth: width, scrollLeft } = $("tiers");
    const sharpness = window.devicePixelRatio || 1;
    [canvas.width, canvas.height] = [width, PICTURE + AXIS].map((x) => Math.round(x * sharpness));
    canvas.style.width = `${width}px`;
    const context = canvas.getContext("2d");
    context.scale(sharpness, sharpness);
    context.translate(-scrollLeft, 0);
    const { seconds_per_frame: shift, seconds_per_window: span } = this.model;
    const first = (span - shift) / 2; // a frame is drawn in the middle of its window
    const length = this.image.width * shift;
    const colours = theme();
    context.fillStyle = colours.low;
    context.fillRect(scrollLeft, 0, width, PICTURE);
    context.imageSmoothingEnabled = false;
    context.drawImage(this.image, first * scale, 0, length * scale, PICTURE);
    this.drawAxis(context, scrollLeft, width, colours);
  }

  drawAxis(context, left, width, { muted }) {
    const { scale } = this;
    const { seconds } = this.tiers;
    const every = [0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10].find((step) => step * scale >= 55) ?? 30;
    context.textBaseline = "middle";
    const digits = every < 0.1 ? 2 : every < 1 ? 1 : 0;
    for (let i = Math.floor(left / scale / every); i * every <= seconds; i++) {
      const x = i * every * scale;
      if (x > left + width) break;
      context.fillStyle = muted;
      context.fillRect(x, PICTURE, 1, 4);
      const align = i === 0 ? "left" : x > seconds * scale - 20 ? "right" : "center";
      const text = i === 0 ? "0 s" : (i * every).toFixed(digits);
      write(context, text, x, PICTURE + 12, { colour: muted, align });
    }
  }

  // --- The file ---------------------------------------------------------------------------------

  save() {
    const file = new Blob([this.tiers.textgrid()], { type: "text/plain" });
    download(file, this.opened.name.replace(/\.\w{1,4}$/, ""), ".TextGrid");
  }
}

// Return the names of what is before and after a boundary.
function neighbours({ before, after }) {
  return [before, after].map((phone) => phone?.symbol ?? "pause");
}

function saidInstead({ heard }) {
  return `heard ${heard.join(" ") || "nothing"}`;
}

// Say in a sentence whether the words fit.
function describeFit({ words, missing }) {
  const misfits = words.filter(({ fits }) => !fits);
  const sentences = [];
  const number = words.length + missing.length;
  if (!misfits.length && !missing.length) {
    sentences.push(`${number === 1 ? "The word fits" : `All ${number} words fit`} the sound.`);
  }
  if (misfits.length) {
    const heard = misfits.map((word) => `${word.text} (${saidInstead(word)})`);
    const verb = misfits.length === 1 ? "does" : "do";
    sentences.push(`${misfits.length} of ${number} words ${verb} not fit: ${listed(heard)}.`);
  }
  if (missing.length) sentences.push(`Not found in the sound: ${listed(missing)}.`);
  return sentences.join(" ");
}

function listed(words) {
  const some = words.slice(0, MOST_LISTED).join(", ");
  return words.length > MOST_LISTED ? `${some} …` : some;
}

function element(name, className = "", text = "") {
  return Object.assign(document.createElement(name), { className, textContent: text });
}
