// The page: an input is chosen, decoded and looked at; the address holds what is seen.

import { decoded, encoded } from "./address.js";
import { Problem, describeModel, fetchLattice, listExamples, openSource } from "./api.js";
import { decimal, power } from "./figure.js";
import { GRAPHS } from "./bars.js";
import { Lattice } from "./lattice.js";
import { SearchPanel } from "./search.js";
import { Player } from "./sound.js";
import { Stage } from "./stage.js";

const $ = (id) => document.getElementById(id);
const NUM_ROWS = 12; // of the table of numbers

let model, stage, player, search;
let source = null; // {kind: "example", index}, {kind: "text", text} or {kind: "sound", file}
let opened = null; // what the server said of it
let turn = 0; // of what was asked last: earlier answers come too late

// --- Messages -----------------------------------------------------------------------------------

function say(text, isProblem = true) {
  $("message").hidden = false;
  $("message").classList.toggle("problem", isProblem);
  $("message").querySelector("p").textContent = text;
}

function hush() {
  $("message").hidden = true;
}

// Whoever goes on has read what was wrong. A note of the input stays with it.
function goesOn({ target }) {
  const isAction = target.closest("button, input, textarea, canvas") !== null;
  if (isAction && $("message").classList.contains("problem")) hush();
}

// What a person can mend is said, and then what is left on the page; what the server has forgotten
// is opened again.
function failed(error, left = "") {
  if (!(error instanceof Problem)) {
    console.error(error);
    say("Something went wrong in this page; load it again.");
  } else if (error.status === 410 && source !== null) {
    open(source, currentView());
  } else say(`${error.message} ${left}`.trim());
}

// What is on the page when an input, or a target, was refused.
function stillShown(what = opened?.name) {
  return $("lattice").hidden ? "" : `What is shown is still ${what}.`;
}

// --- Inputs -------------------------------------------------------------------------------------

async function open(wanted, view = {}) {
  const mine = ++turn;
  hush();
  document.body.classList.add("busy");
  try {
    const found = await openSource(wanted);
    if (mine !== turn) return;
    [source, opened] = [wanted, found];
    player.setInput(opened.input);
    search.setInput(opened.input);
    $("outputs-name").textContent = opened.name;
    listHypotheses();
    markExample();
    for (const id of ["outputs", "search"]) $(id).hidden = false;
    for (const id of ["play", "space-key"]) $(id).hidden = !opened.has_sound;
    if (opened.notes.length) say(opened.notes.join(" "), false);
    const best = opened.hypotheses.length ? opened.hypotheses[0].symbols : [];
    await showLattice(view.target ?? best, view, mine);
  } catch (error) {
    if (mine !== turn) return;
    if (source === wanted) $("lattice").hidden = true; // it was of the input before
    failed(error, stillShown());
  } finally {
    if (mine === turn) document.body.classList.remove("busy");
  }
}

async function showLattice(target, view = {}, mine = ++turn) {
  $("target").value = target.join(" ");
  const packed = await fetchLattice(opened.input, target);
  if (mine !== turn) return;
  $("lattice").hidden = false;
  $("nothing").hidden = true;
  $("input-name").textContent = opened.name;
  markHypothesis(target);
  stage.show(new Lattice(packed, model.symbols), view.node, view.seen);
}

function attempt(target) {
  hush();
  showLattice(target).catch((error) => failed(error, stillShown("the target before")));
}

async function listThem(first = 0) {
  const asked = $("find").value;
  try {
    const { count, examples } = await listExamples(asked, first);
    if (asked !== $("find").value) return;
    const items = examples.map(exampleItem);
    if (first + examples.length < count) items.push(moreItem(first + examples.length, count));
    if (first === 0) $("examples").replaceChildren(...items);
    else $("examples").lastElementChild.replaceWith(...items);
    if (count === 0) $("examples").append(element("li", "none", "No example has that."));
    markExample();
  } catch (error) {
    failed(error);
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
  button.addEventListener("click", () => listThem(first));
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
  const items = opened.hypotheses.map(({ symbols, log_prob }) => {
    const item = element("li");
    const button = element("button");
    button.type = "button";
    const text = symbols.join(" ");
    button.append(element("span", "symbols", text || "(empty)"));
    if (reference && text === reference) button.append(element("span", "tag", "reference"));
    button.append(element("span", "number", power(log_prob)));
    button.dataset.target = text;
    button.addEventListener("click", () => attempt(symbols));
    item.append(button);
    return item;
  });
  if (!items.length) items.push(element("li", "none", "The search found nothing."));
  $("hypotheses").replaceChildren(...items);
  $("reference").hidden = !reference;
}

function markHypothesis(target) {
  const text = target.join(" ");
  for (const button of $("hypotheses").querySelectorAll("button")) {
    button.setAttribute("aria-pressed", String(button.dataset.target === text));
  }
  const isReference = opened.target.length && text === opened.target.join(" ");
  $("target-note").textContent = isReference ? "(the reference)" : "";
}

// --- What is seen, in numbers and in the address ------------------------------------------------

// A node is t,u as `transduce plot --at` takes it, and as the address holds it: both from 0.
function tell() {
  const { lattice, node } = stage;
  const { t, u } = node;
  const bars = lattice.bars(t, u);
  const next = lattice.next(u);
  const [T, U] = [lattice.T, lattice.U];
  const seconds = secondsPerVector();
  const time = seconds ? ` (${(t * seconds).toFixed(2)} s)` : "";
  const after = u === 0 ? "no label yet" : `the last label ${lattice.target[u - 1]}`;
  const arrows = [`null ${bars.output[0].toFixed(3)}`];
  if (next) arrows.push(`next label ${lattice.outputs[next]} ${bars.output[next].toFixed(3)}`);
  const parts = [
    `Node ${t},${u}${time} of 0,0 to ${T - 1},${U}, ${after}: ${arrows.join(", ")}.`,
    `ln α ${decimal(lattice.at("forward", t, u), 2)}, ln β ${decimal(lattice.at("backward", t, u), 2)};`,
    `the alignment passes here with probability ${power(lattice.at("product", t, u))}.`,
    `ln Pr(y|x) ${decimal(lattice.logLikelihood, 2)}.`,
  ];
  if (u > 0) parts.splice(1, 0, whenEmitted(lattice.target[u - 1], lattice.timings[u - 1]));
  if (stage.held) parts.push("Held.");
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
  const state = stage.canvas.dataset;
  Object.assign(state, { t, u });
}

// Where a label sits in time: the peak, and between which times it is with 90 %.
function whenEmitted(symbol, { start, frame, end, confidence }) {
  const seconds = secondsPerVector();
  const time = (t) => (seconds ? (t * seconds).toFixed(2) : String(t));
  const unit = seconds ? " s" : "";
  const peak = seconds ? `at ${time(frame)}${unit}` : `at frame ${time(frame)}`;
  const range = `${time(start)} to ${time(end)}${unit}`;
  return `${symbol} is emitted ${peak} (${range}), confidence ${confidence.toFixed(2)}.`;
}

function secondsPerVector() {
  return model.seconds_per_frame && model.seconds_per_frame * model.frames_per_vector;
}

function currentView() {
  const { lattice, node, viewport } = stage;
  if (lattice === null) return {};
  const seen = viewport.isWhole ? null : [viewport.t0, viewport.t1, viewport.u0, viewport.u1];
  return { target: lattice.target, node: [node.t, node.u], seen };
}

let written = ""; // the address as this page wrote it last
let timer = null;

function writeAddress() {
  written = encoded(source, currentView(), stage.map, stage.scale);
  history.replaceState(null, "", written);
}

function changed() {
  tell();
  clearTimeout(timer);
  timer = setTimeout(writeAddress, 120);
}

// Restores what the address says.
async function readAddress() {
  written = location.hash;
  const said = decoded(location.hash);
  choose("map", said.map ?? stage.map);
  choose("scale", said.scale ?? stage.scale);
  stage.choose(chosen("map"), chosen("scale"));
  if (said.source?.kind === "text") $("text").value = said.source.text;
  if (said.source) await open(said.source, said.view);
  else if (said.lost) {
    say(`This address is of the sound file ${said.lost}, which it cannot hold; choose it again.`);
  }
}

const chosen = (name) => document.querySelector(`input[name=${name}]:checked`).value;

function choose(name, value) {
  document.querySelector(`input[name=${name}][value=${value}]`).checked = true;
}

// --- Sound and pictures -------------------------------------------------------------------------

async function playPause() {
  if (!opened?.has_sound) return;
  if (player.playing) {
    player.pause();
    return;
  }
  $("play").textContent = "Pause";
  $("play").setAttribute("aria-pressed", "true");
  try {
    const seconds = secondsPerVector();
    await player.play(stage.viewport.t0 * seconds, stage.viewport.t1 * seconds);
  } catch (error) {
    stopped();
    failed(error instanceof DOMException ? new Problem("This browser cannot play it.") : error);
  }
}

function stopped() {
  $("play").textContent = "Play";
  $("play").setAttribute("aria-pressed", "false");
}

async function save() {
  const { lattice } = stage;
  const subtitle = `${lattice.target.join(" ") || "(empty)"} — ${model.name}`;
  const blob = await stage.picture(`Output lattice of ${opened.name}`, subtitle);
  const link = element("a");
  link.href = URL.createObjectURL(blob);
  link.download = `lattice-${opened.name.replace(/[^\p{L}\p{N}._-]+/gu, "-").slice(0, 60)}.png`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

async function share() {
  writeAddress();
  const note = source.kind === "sound" ? " It cannot hold this sound: it names the file, no more." : "";
  try {
    await navigator.clipboard.writeText(location.href);
    say(`The address of this view is copied.${note}`, false);
  } catch {
    say(`Copy the address of this view from the browser's address bar.${note}`, false);
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
    failed(new Problem(`${problem} choose a shorter part.`), stillShown());
  } else open({ kind: "sound", file });
}

function describe() {
  const what = { text: "text", sound: "sound", frames: "frames" }[model.kind];
  $("model").textContent = `${model.name}: ${what} to ${model.symbols.length} symbols`;
  document.title = `${model.name} — transduce explorer`;
  $("text-form").hidden = model.kind !== "text";
  $("drop").hidden = model.kind !== "sound";
  $("examples-box").hidden = model.num_examples === 0;
  $("drop-hint").textContent = `or drop one here (${model.max_seconds} s at most)`;
  $("find-label").textContent = `Pick one of ${model.num_examples.toLocaleString("en")} examples`;
  $("alphabet").textContent = model.symbols.join(" ");
  $("nothing").textContent = howToBegin();
}

function howToBegin() {
  const own = { text: "type a word", sound: "choose a sound file" }[model.kind];
  const ways = [...(model.num_examples ? ["pick an example"] : []), ...(own ? [own] : [])];
  if (!ways.length) return "The model takes frames; start transduce explore with --data.";
  const text = ways.join(", or ");
  return `${text[0].toUpperCase()}${text.slice(1)}.`;
}

function listen() {
  const on = (id, event, action) => $(id).addEventListener(event, action);
  on("text-form", "submit", (event) => {
    event.preventDefault();
    open({ kind: "text", text: $("text").value });
  });
  on("file", "change", () => {
    takeFile($("file").files[0]);
    $("file").value = "";
  });
  on("find", "input", () => {
    clearTimeout(on.find);
    on.find = setTimeout(listThem, 120);
  });
  on("target-form", "submit", (event) => {
    event.preventDefault();
    attempt($("target").value.split(/\s+/).filter(Boolean));
  });
  on("target", "keydown", (event) => {
    if (event.key !== "Enter") return;
    event.preventDefault();
    $("target-form").requestSubmit();
  });
  on("reference", "click", () => attempt(opened.target));
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
  on("save", "click", () => save().catch(failed));
  $("message").querySelector("button").addEventListener("click", hush);
  for (const event of ["click", "input"]) document.addEventListener(event, goesOn, true);
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
    else if (file) say("The model takes text, not sound; type a word.");
  });
}

async function start() {
  try {
    model = await describeModel();
  } catch (error) {
    $("model").textContent = "";
    failed(error);
    return;
  }
  describe();
  stage = new Stage($("figure"), model, { changed, failed, playPause });
  player = new Player({ time: (seconds) => stage.setCursor(seconds / secondsPerVector()), stopped });
  search = new SearchPanel(model, { failed, cursor: (t) => stage.setCursor(t) });
  listen();
  if (model.num_examples > 0) listThem();
  await readAddress();
}

start();
