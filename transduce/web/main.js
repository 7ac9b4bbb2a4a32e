// The page: choose an input, show its outputs and lattice, and keep the view in the address.

import { decoded, encoded } from "./address.js";
import { AlignmentPanel } from "./alignment.js";
import {
  Problem, describeModel, fetchLattice, fetchSpeech, listExamples, openSource,
} from "./api.js";
import { HEAT } from "./colours.js";
import { differences, shortened } from "./differences.js";
import { decimal, power } from "./figure.js";
import { download } from "./files.js";
import { GRAPHS } from "./bars.js";
import { Lattice, MAPS } from "./lattice.js";
import { Recording } from "./microphone.js";
import { SaidPanel } from "./said.js";
import { SearchPanel } from "./search.js";
import { Player } from "./sound.js";
import { SPEECH_MAPS, SpeechLattice } from "./speech.js";
import { Stage } from "./stage.js";

const $ = (id) => document.getElementById(id);
const NUM_ROWS = 12; // in the table of numbers
const REDRAW = 1000; // milliseconds between two drawings of a recording, or as long as one takes
const RECENT = 10; // seconds of a recording that are in view

let model, stage, player;
let search, alignment; // of a transducer with labels
let said; // of a continuous one
let source = null; // {kind: "example", index}, {kind: "text", text} or {kind: "sound", file}
let opened = null; // the server's answer to it
let recording = null; // while the microphone records
let turn = 0; // number of the latest request; answers to earlier ones are ignored

// --- Messages -----------------------------------------------------------------------------------

function showMessage(text, isProblem = true) {
  $("message").hidden = false;
  $("message").classList.toggle("problem", isProblem);
  $("message").querySelector("p").textContent = text;
}

function hideMessage() {
  $("message").hidden = true;
}

// Hide a problem at the user's next action. A note on the input stays.
function hideProblem({ target }) {
  const isAction = target.closest("button, input, textarea, canvas") !== null;
  if (isAction && $("message").classList.contains("problem")) hideMessage();
}

// Show a problem, and then `left`, a sentence on what the page still shows. If the server no longer
// keeps the input, open it again.
function report(error, left = "") {
  if (!(error instanceof Problem)) {
    console.error(error);
    showMessage("This page failed; reload it.");
  } else if (error.status === 410 && source !== null) {
    open(source, currentView());
  } else showMessage(`${error.message} ${left}`.trim());
}

// A sentence on what the page still shows when it could not show an input or a target.
function stillShown(what = opened?.name) {
  return $("lattice").hidden ? "" : `The page still shows ${what}.`;
}

// --- Inputs -------------------------------------------------------------------------------------

async function open(wanted, view = {}) {
  const mine = ++turn;
  hideMessage();
  endRecording();
  document.body.classList.add("busy");
  try {
    const found = await openSource(wanted);
    if (mine !== turn) return;
    [source, opened] = [wanted, found];
    if (source.kind === "text") $("text").value = source.text;
    if (opened.notes.length) showMessage(opened.notes.join(" "), false);
    markExample();
    if (model.speaks) {
      said.setInput(opened);
      const { generation = said.first(opened) } = view;
      await showSpeech(generation, view, mine);
      return;
    }
    player.setInput(opened.input);
    search.setInput(opened.input);
    $("outputs-name").textContent = opened.name;
    listHypotheses();
    for (const id of ["outputs", "search"]) $(id).hidden = false;
    for (const id of ["play", "space-key"]) $(id).hidden = !opened.has_sound;
    const best = opened.hypotheses.length ? opened.hypotheses[0].symbols : [];
    await showLattice(view.target ?? best, view, mine);
  } catch (error) {
    if (mine !== turn) return;
    // They belong to the previous input.
    if (source === wanted) $("lattice").hidden = $("alignment").hidden = true;
    report(error, stillShown());
  } finally {
    if (mine === turn) document.body.classList.remove("busy");
  }
}

async function showLattice(target, view = {}, mine = ++turn) {
  $("target").value = target.join(" ");
  const packed = await fetchLattice(opened.input, target);
  if (mine !== turn) return;
  revealLattice();
  markHypothesis(target);
  const lattice = new Lattice(packed, model);
  alignment.setInput(opened, lattice);
  stage.show(lattice, view.node, view.seen);
}

function revealLattice() {
  $("lattice").hidden = false;
  $("nothing").hidden = true;
  $("input-name").textContent = opened.name;
}

// Show the lattice of generated speech, or, of null, that of the recording.
async function showSpeech(generation, view = {}, mine = ++turn) {
  $("said").hidden = false;
  const packed = await fetchSpeech(opened.input, generation);
  if (mine !== turn) return;
  said.choose(generation);
  revealLattice();
  for (const id of ["play", "space-key"]) $(id).hidden = false;
  const lattice = new SpeechLattice(packed, model, generation);
  player.setInput(lattice.view);
  if (packed.header.notes.length) showMessage(packed.header.notes.join(" "), false);
  stage.show(lattice, view.node, view.seen);
}

function trySpeech(generation) {
  hideMessage();
  showSpeech(generation).catch((error) => report(error, stillShown("the previous sound")));
}

function tryLattice(target) {
  hideMessage();
  showLattice(target).catch((error) => report(error, stillShown("the previous target")));
}

// --- The microphone -----------------------------------------------------------------------------

async function recordOrStop() {
  if (recording !== null) {
    openRecording();
    return;
  }
  hideMessage();
  const failed = (problem) => openRecording(problem);
  const mine = new Recording(model, { full: openRecording, failed });
  recording = Object.assign(mine, { timer: null, isDrawing: false, rest: 0 });
  try {
    await mine.start();
    if (recording !== mine) return;
    mine.timer = setInterval(drawRecording, REDRAW);
    showRecording();
  } catch (error) {
    endRecording();
    report(error, stillShown());
  }
}

// Stop, and open what was recorded; then say why, if the user did not stop it.
async function openRecording(problem = null) {
  const ended = endRecording();
  if (ended === null) return;
  try {
    await open({ kind: "sound", file: ended.file() });
  } catch (error) {
    report(error, stillShown());
  }
  if (problem !== null) report(problem);
}

// Stop without opening what was recorded; return it, or null if there is none.
function endRecording() {
  const ended = recording;
  recording = null;
  if (ended !== null) {
    clearInterval(ended.timer);
    ended.close();
    showRecording();
  }
  return ended;
}

function showRecording() {
  const seconds = Math.floor(recording?.seconds ?? 0);
  $("record").textContent = recording === null ? "Record" : `Stop (${seconds} s)`;
  $("record").setAttribute("aria-pressed", String(recording !== null));
}

// Draw the lattice of the sound so far and of the best output so far. Between two drawings, the
// server has time for other requests.
async function drawRecording() {
  showRecording();
  const mine = recording;
  const begun = performance.now();
  if (mine.input === null || mine.isDrawing || begun < mine.rest) return;
  mine.isDrawing = true;
  const [symbols, drawing] = [mine.symbols, ++turn];
  try {
    const lattice = new Lattice(await fetchLattice(mine.input, symbols), model, true);
    if (recording !== mine || drawing !== turn) return;
    const found = [{ symbols, log_prob: lattice.logLikelihood }];
    source = null;
    opened = { input: mine.input, name: "the recording", target: [], hypotheses: found };
    for (const id of ["input-name", "outputs-name"]) $(id).textContent = opened.name;
    for (const id of ["play", "space-key", "alignment", "search", "nothing"]) $(id).hidden = true;
    for (const id of ["outputs", "lattice"]) $(id).hidden = false;
    listHypotheses();
    markExample();
    markHypothesis(symbols);
    $("target").value = symbols.join(" ");
    stage.show(lattice, lattice.path.at(-1), recentPart(lattice));
  } catch (error) {
    if (recording === mine && drawing === turn) openRecording(error);
  } finally {
    mine.isDrawing = false;
    mine.rest = 2 * performance.now() - begun;
  }
}

// Return the part of a lattice that shows its last seconds; null if it is the whole.
function recentPart(lattice) {
  const { T, U, path } = lattice;
  const first = T - Math.round(RECENT / model.seconds_per_frame / model.frames_per_vector);
  if (first <= 0) return null;
  return [first, T, path.find(([t]) => t >= first)[1], U + 1];
}

async function loadExamples(first = 0) {
  const asked = $("find").value;
  try {
    const { count, examples } = await listExamples(asked, first);
    if (asked !== $("find").value) return;
    const items = examples.map(exampleItem);
    if (first + examples.length < count) items.push(moreItem(first + examples.length, count));
    if (first === 0) $("examples").replaceChildren(...items);
    else $("examples").lastElementChild.replaceWith(...items);
    if (count === 0) $("examples").append(element("li", "none", "No example matches."));
    markExample();
  } catch (error) {
    report(error);
  }
}

function exampleItem({ index, name, target }) {
  const item = element("li");
  const button = element("button");
  button.type = "button";
  button.dataset.index = index;
  button.append(element("strong", "", name), element("span", "symbols", target.join(" ")));
  button.addEventListener("click", () => open({ kind: "example", index }));
  item.append(button);
  return item;
}

function moreItem(first, count) {
  const item = element("li");
  const button = element("button", "link", `${count - first} more`);
  button.type = "button";
  button.addEventListener("click", () => loadExamples(first));
  item.append(button);
  return item;
}

function markExample() {
  for (const button of $("examples").querySelectorAll("[data-index]")) {
    const here = source?.kind === "example" && Number(button.dataset.index) === source.index;
    if (here) button.setAttribute("aria-current", "true");
    else button.removeAttribute("aria-current");
  }
}

function listHypotheses() {
  const reference = opened.target.join(" ");
  const items = opened.hypotheses.map(({ symbols, log_prob }, i) => {
    const item = element("li");
    const button = element("button");
    button.type = "button";
    const text = symbols.join(" ");
    const best = i > 0 ? opened.hypotheses[0].symbols : symbols;
    button.append(writtenSymbols(symbols, best));
    button.title = text || "(empty)";
    button.setAttribute("aria-label", `${text || "empty"}, probability ${power(log_prob)}`);
    if (reference && text === reference) button.append(element("span", "tag", "reference"));
    button.append(element("span", "number", power(log_prob)));
    button.dataset.target = text;
    button.addEventListener("click", () => tryLattice(symbols));
    item.append(button);
    return item;
  });
  if (!items.length) items.push(element("li", "none", "The search found no outputs."));
  $("hypotheses").replaceChildren(...items);
  $("reference").hidden = !reference;
}

// Write an output; of one that is not the best, write what differs from the best.
function writtenSymbols(symbols, best) {
  const all = element("span", "symbols", symbols.join(" ") || "(empty)");
  if (symbols === best) return all;
  const steps = differences(best, symbols);
  if (steps === null) return all;
  const line = element("span", "symbols differences");
  const tags = { in: "ins", out: "del", same: "span", gap: "span" };
  for (const [kind, symbol] of shortened(steps)) {
    line.append(element(tags[kind], "", symbol), " ");
  }
  return line;
}

function markHypothesis(target) {
  const text = target.join(" ");
  for (const button of $("hypotheses").querySelectorAll("button")) {
    button.setAttribute("aria-pressed", String(button.dataset.target === text));
  }
  const isReference = opened.target.length && text === opened.target.join(" ");
  $("target-note").textContent = isReference ? "(the reference)" : "";
}

// --- What the figure shows ----------------------------------------------------------------------

const MOST_SYMBOLS = 12; // of a target in a sentence

// Say in a sentence what the map shows.
function describeFigure() {
  const { lattice, map } = stage;
  if (model.speaks) {
    $("seen").textContent = said.seen(lattice, map);
    return;
  }
  const [across, upwards] = lattice.backwards
    ? ["right to left", "top to bottom"]
    : ["left to right", "bottom to top"];
  const symbols = lattice.target.slice(0, MOST_SYMBOLS).join(" ");
  const target = lattice.U > MOST_SYMBOLS ? `${symbols} …` : symbols || "nothing";
  const bright = {
    product: "The bright band shows when.",
    forward: "Bright nodes are easy to reach.",
    backward: "From bright nodes the end is easy to reach.",
  }[map];
  const sentences = [
    `Reading ${opened.name} from ${across}, the network emits ${target} from ${upwards}.`,
    bright,
    `Pr(y|x) = ${power(lattice.logLikelihood)} (Eq. 17).`,
  ];
  $("seen").textContent = sentences.join(" ");
}

// --- Numbers at the crosshair, and the address --------------------------------------------------

// Write the numbers of the node at the crosshair. Nodes are t,u counted from 0, as in the address
// and in `transduce plot --at`.
function describeNode() {
  const { lattice, node } = stage;
  const { t, u } = node;
  const [nodeT, nodeU] = lattice.node(t, u);
  Object.assign(stage.canvas.dataset, { t: nodeT, u: nodeU });
  if (model.speaks) {
    $("readout").textContent = said.readout(lattice, t, u, stage.held);
    return;
  }
  const bars = lattice.bars(t, u);
  const next = lattice.next(u);
  const [T, U] = [lattice.T, lattice.U];
  const time = model.seconds_per_frame ? ` (${secondsAt(t).toFixed(2)} s)` : "";
  const last = lattice.last(u);
  const after = last < 0 ? "no label yet" : `last label ${lattice.target[last]}`;
  const arrows = [`null ${bars.output[0].toFixed(3)}`];
  if (next) arrows.push(`next label ${lattice.outputs[next]} ${bars.output[next].toFixed(3)}`);
  const parts = [
    `Node ${t},${u}${time} of 0,0 to ${T - 1},${U}, ${after}: ${arrows.join(", ")}.`,
    `ln α ${decimal(lattice.at("forward", t, u), 2)}, ln β ${decimal(lattice.at("backward", t, u), 2)};`,
    `the alignment passes here with probability ${power(lattice.at("product", t, u))}.`,
    `ln Pr(y|x) ${decimal(lattice.logLikelihood, 2)}.`,
  ];
  if (last >= 0) parts.splice(1, 0, whenEmitted(lattice.target[last], lattice.timings[last]));
  if (stage.held) parts.push("The crosshair is locked.");
  $("readout").textContent = parts.join(" ");
  const ids = bars.output.map((_, k) => k).sort((a, b) => bars.output[b] - bars.output[a]);
  const rows = ids.slice(0, NUM_ROWS).map((k) => {
    const row = element("tr");
    const head = element("th", "", lattice.outputs[k]);
    head.scope = "row";
    row.append(head);
    for (const { name } of GRAPHS) {
      const cell = element("td", "", power(Math.log(bars[name][k])));
      cell.dataset.value = bars[name][k];
      row.append(cell);
    }
    return row;
  });
  $("number-rows").replaceChildren(...rows);
}

// A sentence on the timing of a label: its peak, and the interval of 90 % probability.
function whenEmitted(symbol, { start, frame, end, confidence }) {
  const inSeconds = Boolean(model.seconds_per_frame);
  const time = (t) => (inSeconds ? secondsAt(t).toFixed(2) : String(t));
  const unit = inSeconds ? " s" : "";
  const peak = inSeconds ? `at ${time(frame)}${unit}` : `at frame ${time(frame)}`;
  const range = `${time(start)} to ${time(end)}${unit}`;
  return `${symbol} is emitted ${peak} (${range}), confidence ${confidence.toFixed(2)}.`;
}

// Return the seconds at which a transcription vector begins.
function secondsAt(t) {
  return Math.max(0, stage.lattice.frame(t)) * model.seconds_per_frame;
}

function currentView() {
  const { lattice, node, viewport } = stage;
  if (lattice === null) return {};
  const seen = viewport.isWhole ? null : [viewport.t0, viewport.t1, viewport.u0, viewport.u1];
  const shown = model.speaks ? { generation: lattice.generation } : { target: lattice.target };
  return { ...shown, node: lattice.node(node.t, node.u), seen };
}

let written = ""; // the address that this page wrote last
let timer = null;

function writeAddress() {
  if (source === null) return; // a recording has an address when it is stopped
  written = encoded(source, currentView(), stage.map, stage.scale);
  history.replaceState(null, "", written);
  delete stage.canvas.dataset.unwritten;
}

function changed() {
  describeNode();
  describeFigure();
  clearTimeout(timer);
  stage.canvas.dataset.unwritten = ""; // until the address is that of the view
  timer = setTimeout(writeAddress, 120);
}

// Restore the view that the address holds.
async function readAddress() {
  written = location.hash;
  const parts = decoded(location.hash, Object.keys(maps()));
  choose("map", parts.map ?? stage.map);
  choose("scale", parts.scale ?? stage.scale);
  stage.choose(chosen("map"), chosen("scale"));
  if (parts.source) await open(parts.source, parts.view);
  else if (parts.lost) {
    const fault = `This address names the sound file ${parts.lost}, but does not contain it;`;
    showMessage(`${fault} choose the file again.`);
  } else if (model.first && opened === null) await open(model.first);
}

const maps = () => (model.speaks ? SPEECH_MAPS : MAPS);

const chosen = (name) => document.querySelector(`input[name=${name}]:checked`).value;

function choose(name, value) {
  document.querySelector(`input[name=${name}][value=${value}]`).checked = true;
}

// --- Sound and pictures -------------------------------------------------------------------------

async function playPause() {
  if (!opened?.has_sound && !model.speaks) return;
  if (player.playing) {
    player.pause();
    return;
  }
  $("play").textContent = "Pause";
  $("play").setAttribute("aria-pressed", "true");
  try {
    await player.play(secondsAt(stage.viewport.t0), secondsAt(stage.viewport.t1));
  } catch (error) {
    showPlay();
    const unplayable = error instanceof DOMException;
    report(unplayable ? new Problem("This browser cannot play the sound.") : error);
  }
}

function showPlay() {
  $("play").textContent = "Play";
  $("play").setAttribute("aria-pressed", "false");
}

async function save() {
  const { lattice } = stage;
  const subtitle = `${lattice.words} — ${model.name}`;
  const blob = await stage.picture(`Output lattice of ${opened.name}`, subtitle);
  download(blob, `lattice-${opened.name}`, ".png");
}

async function share() {
  if (source === null) {
    showMessage("Stop the recording to copy its address.", false);
    return;
  }
  writeAddress();
  const note = source.kind === "sound" ? " It names the sound file, but does not contain it." : "";
  try {
    await navigator.clipboard.writeText(location.href);
    showMessage(`The address of this view is copied.${note}`, false);
  } catch {
    showMessage(`Copy the address of this view from the browser's address bar.${note}`, false);
  }
}

// --- Setting up ---------------------------------------------------------------------------------

function element(name, className = "", text = "") {
  return Object.assign(document.createElement(name), { className, textContent: text });
}

function takeFile(file) {
  if (!file) return;
  if (file.size > model.max_bytes) {
    const problem = `The file ${file.name} is larger than ${model.max_bytes / 1e6} MB;`;
    report(new Problem(`${problem} choose a shorter part.`), stillShown());
  } else open({ kind: "sound", file });
}

function showModel() {
  const count = `${model.symbols.length} symbols`;
  const what = model.speaks ? `${count} to sound` : `${model.kind} to ${count}`;
  $("model").textContent = `${model.name}: ${what}`;
  document.title = `${model.name} — transduce explorer`;
  const kind = model.speaks ? "speech" : "labels";
  for (const part of document.querySelectorAll("[data-of]")) part.hidden = part.dataset.of !== kind;
  $("maps").append(...Object.keys(maps()).map(mapChoice));
  $("text-form").hidden = model.kind !== "text";
  $("drop").hidden = model.kind !== "sound";
  $("examples-box").hidden = model.num_examples === 0;
  $("drop-hint").textContent = `or drop one here (${model.max_seconds} s at most)`;
  $("find-label").textContent = `Choose one of ${model.num_examples.toLocaleString("en")} examples`;
  $("record").title = model.streams
    ? `Recognise the microphone while you speak, ${model.max_seconds} s at most.`
    : "Record, then recognise: this model needs the whole sound, so that it cannot stream.";
  $("alphabet").textContent = model.symbols.join(" ");
  $("nothing").textContent = waysToStart();
}

// Return the button that chooses a map.
function mapChoice(name) {
  const label = element("label");
  const input = Object.assign(element("input"), { type: "radio", name: "map", value: name });
  input.checked = name === "product";
  label.append(input, element("span", "", name));
  return label;
}

function waysToStart() {
  const own = { text: model.speaks ? "type what to say" : "type a word", sound: "choose or record a sound" }[model.kind];
  const ways = [...(model.num_examples ? ["choose an example"] : []), ...(own ? [own] : [])];
  if (!ways.length) return "The model takes frames; restart transduce explore with --data.";
  const text = ways.join(", or ");
  return `${text[0].toUpperCase()}${text.slice(1)}.`;
}

function addListeners() {
  const on = (id, event, action) => $(id).addEventListener(event, action);
  on("text-form", "submit", (event) => {
    event.preventDefault();
    open({ kind: "text", text: $("text").value });
  });
  on("file", "change", () => {
    takeFile($("file").files[0]);
    $("file").value = "";
  });
  on("record", "click", recordOrStop);
  on("find", "input", () => {
    clearTimeout(on.find);
    on.find = setTimeout(loadExamples, 120);
  });
  on("target-form", "submit", (event) => {
    event.preventDefault();
    tryLattice($("target").value.split(/\s+/).filter(Boolean));
  });
  on("target", "keydown", (event) => {
    if (event.key !== "Enter") return;
    event.preventDefault();
    $("target-form").requestSubmit();
  });
  on("reference", "click", () => tryLattice(opened.target));
  on("alphabet-button", "click", () => {
    $("alphabet").hidden = !$("alphabet").hidden;
    $("alphabet-button").setAttribute("aria-expanded", String(!$("alphabet").hidden));
  });
  for (const input of document.querySelectorAll("#maps input, #scales input")) {
    input.addEventListener("change", () => stage.choose(chosen("map"), chosen("scale")));
  }
  on("zoom-in", "click", () => stage.zoom(1.5));
  on("zoom-out", "click", () => stage.zoom(1 / 1.5));
  on("zoom-fit", "click", () => stage.fit());
  on("play", "click", playPause);
  on("share", "click", share);
  on("save", "click", () => save().catch(report));
  $("message").querySelector("button").addEventListener("click", hideMessage);
  for (const event of ["click", "input"]) document.addEventListener(event, hideProblem, true);
  window.addEventListener("hashchange", () => location.hash !== written && readAddress());
  window.addEventListener("dragover", (event) => {
    event.preventDefault();
    document.body.classList.add("dropping");
  });
  window.addEventListener("dragleave", () => document.body.classList.remove("dropping"));
  window.addEventListener("drop", (event) => {
    event.preventDefault();
    document.body.classList.remove("dropping");
    const file = event.dataTransfer.files[0];
    if (model.kind === "sound") takeFile(file);
    else if (file) showMessage(`The model takes ${model.kind}, not sound.`);
  });
}

async function start() {
  try {
    model = await describeModel();
  } catch (error) {
    $("model").textContent = "";
    report(error);
    return;
  }
  HEAT.set(model.colours);
  showModel();
  const detailed = (detail) => model.speaks && said.list(detail);
  stage = new Stage($("figure"), model, { changed, detailed, report, playPause });
  const setTime = (seconds) =>
    stage.setCursor(stage.lattice.vector(seconds / model.seconds_per_frame));
  player = new Player({ time: setTime, stopped: showPlay });
  if (model.speaks) said = new SaidPanel(model, trySpeech);
  else {
    search = new SearchPanel(model, { report, cursor: (t) => stage.setCursor(t) });
    alignment = new AlignmentPanel(model, { report, playing: () => player.pause() });
  }
  addListeners();
  if (model.num_examples > 0) loadExamples();
  await readAddress();
}

start();
