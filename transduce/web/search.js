// The beam search frame by frame: B before a frame, B after it, and the flows between them.

import { beginSearch, fetchSteps } from "./api.js";
import { power } from "./figure.js";

const $ = (id) => document.getElementById(id);
const ROW = 30; // height of a hypothesis in pixels, as in style.css
const CONTEXT = 3; // symbols shown before the first in which hypotheses differ

export class SearchPanel {
  // `callbacks` has report(problem), and cursor(t), which marks a frame in the figure.
  constructor(model, callbacks) {
    Object.assign(this, { model, callbacks, steps: null, running: null });
    $("beam-width").max = model.max_beam_width;
    $("search-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.run();
    });
    $("stop").addEventListener("click", () => this.stop());
    $("step").addEventListener("input", () => this.show(Number($("step").value)));
    $("step-back").addEventListener("click", () => this.show(this.now - 1));
    $("step-on").addEventListener("click", () => this.show(this.now + 1));
  }

  setInput(input) {
    Object.assign(this, { input, steps: null, running: null });
    $("steps").hidden = true;
    this.showProgress("");
  }

  // Ask for the frames in parts, show the progress, and end early if `stop` is pressed.
  async run() {
    const run = (this.running = {});
    this.showProgress("The search begins …");
    try {
      const { search, num_vectors: last } = await beginSearch(
        this.input,
        Number($("beam-width").value),
      );
      const steps = [];
      while (this.running === run && steps.length <= last) {
        const found = await fetchSteps(search);
        if (this.running !== run) break;
        if (!found.steps.length) break;
        const isFirst = !steps.length;
        steps.push(...found.steps);
        Object.assign(this, { steps, last });
        if (isFirst) this.begin();
        this.showLength();
      }
      if (this.running === run) this.running = null;
      if (this.running === null && this.steps === steps) this.showEnd();
    } catch (error) {
      if (this.running !== run) return;
      this.running = null;
      this.showProgress("");
      this.callbacks.report(error);
    }
  }

  stop() {
    this.running = null;
    if (this.steps === null) this.showProgress("The search was stopped.");
    else this.showEnd();
  }

  begin() {
    $("steps").hidden = false;
    this.wanted = 1; // the step to show, as soon as it is there
  }

  // Show how many frames the search has been through.
  showLength() {
    const done = this.steps.length - 1;
    $("step").max = done;
    this.show(this.wanted);
    this.showProgress(`${done} of ${this.last} frames searched`, done / this.last);
  }

  showEnd() {
    const done = this.steps.length - 1;
    const left = `The search was stopped after ${done} of ${this.last} frames.`;
    this.showProgress(done < this.last ? left : "");
  }

  showProgress(text, share = 0) {
    const running = this.running !== null;
    $("stop").hidden = $("progress").hidden = !running;
    $("progress").value = share;
    $("progress-text").textContent = text;
    $("search-form").querySelector("button").disabled = running;
  }

  // The frame that was searched last; a network that reads backwards begins at the last frame.
  get frame() {
    return this.model.backwards ? this.last - this.now : this.now - 1;
  }

  // Show B after n frames; 0 is the start of the search.
  show(n) {
    this.wanted = n;
    this.now = Math.min(this.steps.length - 1, Math.max(0, n));
    const [last, done] = [this.last, this.steps.length - 1];
    $("step").value = this.now;
    $("step-back").disabled = this.now === 0;
    $("step-on").disabled = this.now === done;
    $("step-name").textContent =
      this.now === 0 ? "before the first frame" : `frame ${this.frame} of 0 to ${last - 1}`;
    this.callbacks.cursor(this.now === 0 ? null : this.frame + 0.5);
    const after = this.steps[this.now];
    const before = this.now > 0 ? this.steps[this.now - 1] : [];
    this.draw(before, after);
  }

  draw(before, after) {
    const inOrder = ([labels]) => (this.model.backwards ? labels.toReversed() : labels);
    const shared = sharedPrefix([...before, ...after].map(inOrder));
    const from = Math.max(0, shared - CONTEXT);
    const total = after.reduce((sum, [, logProb]) => sum + Math.exp(logProb - after[0][1]), 0);
    const share = (logProb) => Math.exp(logProb - after[0][1]) / total;
    const frame = this.now === 0 ? "the first frame" : `frame ${this.frame}`;
    const titles = [`B before ${frame}`, "", this.now === 0 ? "B" : `B after ${frame}`];
    $("flows").replaceChildren(
      ...titles.map((textContent) => element("h3", { textContent })),
      this.column("before", before, from),
      this.ribbons(before, after, share),
      this.column("after", after, from, share),
    );
  }

  column(name, hypotheses, from, share) {
    const list = element("ol", { className: name });
    list.setAttribute("aria-label", `B ${name} the frame`);
    for (const [labels, logProb, flows] of hypotheses) {
      const item = element("li");
      const symbols = this.written(labels, from);
      item.append(element("span", { className: "symbols", textContent: symbols, title: symbols }));
      const probability = element("span", { className: "number", textContent: power(logProb) });
      item.append(probability);
      if (share) {
        const ways = flows.map((flow) => this.way(flow, logProb)).join(", ");
        item.title = `${ways || "the start of the search"}`;
        item.append(element("span", { className: "visually-hidden", textContent: ways }));
        item.dataset.labels = labels.join(" ");
        item.dataset.logProb = logProb;
        const bar = element("span", { className: "share" });
        bar.style.width = `${100 * share(logProb)}%`;
        item.append(bar);
      }
      list.append(item);
    }
    return list;
  }

  way([source, emitted, logProb], total) {
    const percent = (100 * Math.exp(logProb - total)).toFixed(1);
    return `${percent} % from number ${source + 1} by ${this.emitted(emitted)}`;
  }

  emitted(labels) {
    return labels.length ? labels.map((k) => this.model.symbols[k - 1]).join(" ") : "null";
  }

  // Write labels without the first `from` that were emitted.
  written(labels, from) {
    if (labels.length === 0) return "(empty)";
    const isBackwards = this.model.backwards;
    const part = isBackwards ? labels.slice(0, labels.length - from) : labels.slice(from);
    const symbols = part.map((k) => this.model.symbols[k - 1]);
    if (from === 0) return symbols.join(" ");
    return (isBackwards ? [...symbols, "…"] : ["…", ...symbols]).join(" ");
  }

  // Draw a ribbon for each flow; its width is the flow's share of the probability in B.
  ribbons(before, after, share) {
    const height = ROW * Math.max(1, before.length, after.length);
    const svg = element("svg", { class: "ribbons", viewBox: `0 0 100 ${height}` });
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("aria-hidden", "true");
    svg.style.height = `${height}px`;
    const labels = [];
    after.forEach(([, whole, flows], to) => {
      for (const [source, emitted, logProb] of flows) {
        const [y0, y1] = [ROW * (source + 0.5), ROW * (to + 0.5)];
        const path = element("path", { class: emitted.length ? "label" : "null" });
        path.setAttribute("d", `M0 ${y0} C50 ${y0} 50 ${y1} 100 ${y1}`);
        path.style.strokeWidth = `${Math.max(0.6, 20 * share(logProb))}px`;
        svg.append(path);
        if (emitted.length && logProb > whole - 3) {
          const text = element("span", { textContent: this.emitted(emitted) });
          text.style.top = `${0.12 * y0 + 0.88 * y1}px`;
          labels.push(text);
        }
      }
    });
    const box = element("div", { className: "between" });
    box.append(svg, ...labels);
    return box;
  }
}

function sharedPrefix(sequences) {
  if (sequences.length < 2) return 0;
  const [first, ...rest] = sequences;
  const n = first.findIndex((label, i) => rest.some((other) => other[i] !== label));
  return n < 0 ? first.length : n;
}

const SVG = new Set(["svg", "path"]);

function element(name, properties = {}) {
  if (!SVG.has(name)) return Object.assign(document.createElement(name), properties);
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(properties)) made.setAttribute(key, value);
  return made;
}
