// The figure on the page: it redraws after changes, handles the pointer, the wheel and the keys, and
// asks for the details of the node at the crosshair, such as its sensitivities.

import { Problem } from "./api.js";
import { HEAT, painted, theme } from "./colours.js";
import { contains, draw, layout, scales, write } from "./figure.js";
import { Viewport } from "./lattice.js";

const PAUSE = 40; // milliseconds without movement before the page asks for the node's details
const STILL = 4; // pixels that the pointer may move in a click
const TITLE = 52; // pixels for the title of a saved picture

export class Stage {
  // `callbacks` has changed(), called when the address must change; detailed(answer), when the server
  // has answered for the node at the crosshair; report(problem); playPause().
  constructor(canvas, model, callbacks) {
    Object.assign(this, { canvas, model, callbacks, lattice: null, map: "product", scale: "log" });
    Object.assign(this, { cursor: null, held: false, images: {}, pointers: new Map() });
    new ResizeObserver(() => this.redraw()).observe(canvas.parentElement);
    window.addEventListener("resize", () => this.redraw());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.repaint());
    canvas.addEventListener("pointerdown", (event) => this.pressed(event));
    canvas.addEventListener("pointermove", (event) => this.pointed(event));
    canvas.addEventListener("pointerup", (event) => this.released(event));
    canvas.addEventListener("pointercancel", (event) => this.pointers.delete(event.pointerId));
    canvas.addEventListener("wheel", (event) => this.wheeled(event), { passive: false });
    canvas.addEventListener("keydown", (event) => this.typed(event));
  }

  show(lattice, node, seen) {
    this.lattice = lattice;
    this.viewport = new Viewport(lattice.T, lattice.rows);
    if (seen) this.viewport.set(...seen);
    this.cursor = null;
    this.held = false;
    const middle = lattice.path[Math.floor(lattice.path.length / 2)];
    this.node = this.nearest(...(node ? lattice.place(...node) : middle));
    this.detail = null;
    this.images = {};
    delete this.canvas.dataset.sensitivity;
    this.repaint();
    this.moved();
  }

  choose(map, scale) {
    Object.assign(this, { map, scale });
    if (this.lattice === null) return;
    this.repaint();
    this.callbacks.changed();
  }

  repaint() {
    if (this.lattice === null) return;
    this.images.heat = this.lattice.image(this.map, this.scale);
    this.images.picture = this.lattice.picture(theme());
    this.redraw();
  }

  redraw() {
    if (this.lattice === null || this.waiting) return;
    this.waiting = requestAnimationFrame(() => {
      this.waiting = null;
      const width = this.canvas.parentElement.clientWidth;
      if (width === 0) return; // the figure is hidden
      const sharpness = window.devicePixelRatio || 1;
      this.boxes = layout(width, this.lattice, window.innerHeight);
      const { height } = this.boxes;
      const pixels = [Math.round(width * sharpness), Math.round(height * sharpness)];
      if (this.canvas.width !== pixels[0] || this.canvas.height !== pixels[1]) {
        [this.canvas.width, this.canvas.height] = pixels;
        this.canvas.style.height = `${height}px`;
      }
      const context = this.canvas.getContext("2d");
      context.setTransform(sharpness, 0, 0, sharpness, 0, 0);
      draw(context, this.boxes, this, theme());
    });
  }

  // --- The crosshair ----------------------------------------------------------------------------

  // Return the node at a column and a row, or the one of the lattice that is nearest to them.
  nearest(t, u) {
    const { T, rows } = this.lattice;
    return { t: Math.min(T - 1, Math.max(0, t)), u: Math.min(rows - 1, Math.max(0, u)) };
  }

  moveTo(t, u) {
    const node = this.nearest(t, u);
    if (node.t === this.node.t && node.u === this.node.u) return;
    this.node = node;
    this.moved();
  }

  moved() {
    this.redraw();
    this.callbacks.changed();
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.askDetail(), PAUSE);
  }

  // Send one request at a time; after its answer, request the node that is then at the crosshair.
  async askDetail() {
    if (this.asking || this.lattice.grows) return;
    this.asking = true;
    const [lattice, { t, u }] = [this.lattice, this.node];
    try {
      const detail = await lattice.ask(t, u);
      if (this.lattice === lattice) this.paintDetail(detail, t, u);
    } catch (error) {
      if (!(error instanceof Problem)) throw error;
      if (this.lattice === lattice) this.callbacks.report(error);
      return;
    } finally {
      this.asking = false;
    }
    if (this.lattice !== lattice || this.node.t !== t || this.node.u !== u) this.askDetail();
  }

  // Show the server's answer for a node: its sensitivities, and what else the lattice asks for.
  paintDetail(detail, t, u) {
    this.detail = detail;
    // Relative to the largest, on a logarithmic scale.
    const visible = (x) => 1 + Math.log10(Math.abs(x)) / this.model.decades;
    const found = this.lattice.sensitivities(detail.arrays);
    for (const name of ["alongTime", "alongSymbols"]) {
      this.images[name] = painted(found[name].values, ...found[name].shape, visible, HEAT);
    }
    this.canvas.dataset.sensitivity = this.lattice.node(t, u).join(",");
    this.redraw();
    this.callbacks.detailed(detail);
  }

  // --- The visible part -------------------------------------------------------------------------

  zoom(factor, t = this.node.t + 0.5, u = this.node.u + 0.5, timeOnly = false) {
    this.viewport.zoom(factor, t, u, timeOnly);
    this.redraw();
    this.callbacks.changed();
  }

  fit() {
    this.viewport.fit();
    this.redraw();
    this.callbacks.changed();
  }

  // Mark a time, in transcription vectors, of the player or the search; null marks none.
  setCursor(time) {
    this.cursor = time;
    this.canvas.dataset.cursor = time ?? "";
    if (time !== null && (time < this.viewport.t0 || time > this.viewport.t1)) {
      this.viewport.move(time - this.viewport.t0 - 0.1 * (this.viewport.t1 - this.viewport.t0), 0);
    }
    this.redraw();
  }

  // --- Pointer, wheel and keys ------------------------------------------------------------------

  at(event) {
    const box = this.canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }

  pressed(event) {
    if (this.lattice === null || event.button !== 0) return;
    this.canvas.setPointerCapture(event.pointerId);
    const [x, y] = this.at(event);
    this.pointers.set(event.pointerId, { x, y, from: [x, y], dragged: this.pointers.size > 0 });
  }

  pointed(event) {
    if (this.lattice === null || !this.boxes) return;
    const [x, y] = this.at(event);
    const pointer = this.pointers.get(event.pointerId);
    if (!pointer) {
      if (!this.held && event.pointerType !== "touch") this.pointAt(x, y);
      return;
    }
    if (Math.hypot(x - pointer.from[0], y - pointer.from[1]) > STILL) pointer.dragged = true;
    const before = [pointer.x, pointer.y];
    Object.assign(pointer, { x, y });
    if (!pointer.dragged) return;
    const place = scales(this.boxes, this.viewport);
    const others = [...this.pointers.values()].filter((other) => other !== pointer);
    if (others.length) {
      const [other] = others;
      const apart = (px, py) => Math.hypot(px - other.x, py - other.y) || 1;
      const factor = apart(x, y) / apart(...before);
      const [mx, my] = [(x + other.x) / 2, (y + other.y) / 2];
      this.zoom(factor, place.t(mx), place.u(my));
    } else {
      this.viewport.move((before[0] - x) / place.perVector, (y - before[1]) / place.perLabel);
      this.redraw();
      this.callbacks.changed();
    }
  }

  released(event) {
    const pointer = this.pointers.get(event.pointerId);
    this.pointers.delete(event.pointerId);
    if (!pointer || pointer.dragged || !contains(this.boxes.heat, pointer.x, pointer.y)) return;
    if (event.pointerType !== "touch") this.held = !this.held;
    this.pointAt(pointer.x, pointer.y);
    this.redraw();
    this.callbacks.changed();
  }

  // Convert a point: in the lattice to a node, in the input to a frame.
  pointAt(x, y) {
    const { heat, track, picture, alongTime } = this.boxes;
    const place = scales(this.boxes, this.viewport);
    if (contains(heat, x, y)) this.moveTo(Math.floor(place.t(x)), Math.floor(place.u(y)));
    else if ([track, picture, alongTime].some((box) => contains(box, x, y))) {
      this.moveTo(Math.floor(place.t(x)), this.node.u);
    }
  }

  wheeled(event) {
    if (this.lattice === null || !this.boxes) return;
    const [x, y] = this.at(event);
    const { heat, times } = this.boxes;
    if (x < heat.x || y < heat.y || y > times.y + times.h) return;
    if (this.viewport.isWhole && event.deltaY >= 0) return; // let the page scroll
    event.preventDefault();
    const place = scales(this.boxes, this.viewport);
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      this.viewport.move(event.deltaX / place.perVector, 0);
      this.redraw();
      this.callbacks.changed();
      return;
    }
    const factor = Math.exp(-event.deltaY * (event.ctrlKey ? 0.01 : 0.002));
    const beside = y > heat.y + heat.h; // over the input, zoom time only
    this.zoom(factor, place.t(x), place.u(y), beside);
  }

  typed(event) {
    if (this.lattice === null || event.ctrlKey || event.metaKey || event.altKey) return;
    const by = event.shiftKey ? 10 : 1;
    const { t, u } = this.node;
    const moves = {
      ArrowLeft: [t - by, u],
      ArrowRight: [t + by, u],
      ArrowUp: [t, u + by],
      ArrowDown: [t, u - by],
      Home: [0, u],
      End: [this.lattice.T - 1, u],
    };
    const others = {
      "+": () => this.zoom(1.5),
      "=": () => this.zoom(1.5),
      "-": () => this.zoom(1 / 1.5),
      0: () => this.fit(),
      " ": () => this.callbacks.playPause(),
    };
    if (event.key in moves) {
      this.moveTo(...moves[event.key]);
      this.viewport.show(this.node.t, this.node.u);
      this.redraw();
    } else if (event.key in others) others[event.key]();
    else return;
    event.preventDefault();
  }

  // --- The saved picture ------------------------------------------------------------------------

  picture(title, subtitle) {
    const [sharpness, margin] = [2, 20];
    const { width, height } = this.boxes;
    const canvas = document.createElement("canvas");
    canvas.width = sharpness * (width + 2 * margin);
    canvas.height = sharpness * (height + TITLE + 2 * margin);
    const context = canvas.getContext("2d");
    const colours = theme();
    context.fillStyle = colours.paper;
    context.fillRect(0, 0, canvas.width, canvas.height);
    context.scale(sharpness, sharpness);
    context.translate(margin, margin);
    context.textBaseline = "middle";
    write(context, title, 0, 8, { colour: colours.ink, size: 16, weight: 600 });
    write(context, subtitle, 0, 30, { colour: colours.muted, size: 12 });
    context.translate(0, TITLE);
    draw(context, this.boxes, this, colours);
    return new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
  }
}
