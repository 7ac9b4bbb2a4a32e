// The words and phones of an alignment as two tiers. A boundary is where a phone starts or ends. A
// word starts with its first phone and ends with its last, so that both tiers move together.

export const STEP = 0.005; // seconds: by which the arrow keys move, and the shortest phone

const clamp = (x, low, high) => Math.min(high, Math.max(low, x));

export class Tiers {
  // Takes the server's answer, `Alignment.as_json`.
  constructor({ seconds, words }) {
    Object.assign(this, { seconds, words: [], phones: [], boundaries: [] });
    for (const word of words) {
      if (word.phones.length) this.addWord(word);
    }
    this.missing = words.filter(({ phones }) => !phones.length).map(({ word }) => word);
  }

  addWord({ word: text, confidence, fits, heard, phones }) {
    const word = { text, confidence, fits, heard };
    const added = phones.map((phone) => this.addPhone(phone, word));
    this.words.push(Object.assign(word, { start: added[0].start, end: added.at(-1).end }));
    word.start.isOfWord = word.end.isOfWord = true;
  }

  // Add a phone. It shares a boundary with the one before, unless there is a pause between them.
  addPhone({ symbol, start, end, start_bounds, end_bounds, confidence }, word) {
    const phone = { symbol, word, confidence };
    const last = this.boundaries.at(-1);
    const isJoined = last !== undefined && start <= last.time;
    phone.start = isJoined ? last : this.addBoundary(start, start_bounds);
    phone.end = this.addBoundary(Math.max(end, phone.start.time), end_bounds);
    phone.start.after = phone.end.before = phone;
    this.phones.push(phone);
    return phone;
  }

  // `bounds` are the 5 % and 95 % quantiles of a boundary, or null after it was moved; `before` and
  // `after` are the phones on either side, or null in a pause.
  addBoundary(time, bounds) {
    const index = this.boundaries.length;
    const boundary = { index, time, bounds, aligned: { time, bounds } };
    this.boundaries.push(Object.assign(boundary, { before: null, after: null, isOfWord: false }));
    return boundary;
  }

  // Return the earliest and the latest time to which a boundary can move.
  range({ index, time, before, after }) {
    const last = this.boundaries[index - 1]?.time ?? 0;
    const next = this.boundaries[index + 1]?.time ?? Math.floor(1000 * this.seconds) / 1000;
    const low = last + (before === null ? 0 : STEP);
    const high = next - (after === null ? 0 : STEP);
    return [Math.min(low, time), Math.max(high, time)]; // a phone may be shorter than STEP
  }

  // Move a boundary to a time in milliseconds, as near as its neighbours allow.
  move(boundary, time) {
    const moved = Math.round(1000 * clamp(time, ...this.range(boundary))) / 1000;
    if (moved === boundary.time) return;
    Object.assign(boundary, { time: moved, bounds: null });
  }

  // Move a boundary back to where the alignment had it.
  restore(boundary) {
    const { time, bounds } = boundary.aligned;
    this.move(boundary, time);
    if (boundary.time === time) boundary.bounds = bounds;
  }

  // Write both tiers as Praat reads them, like `textgrid` in transduce/model/formats.py.
  textgrid() {
    const marked = (text) => (one) => [one.start.time, one.end.time, text(one)];
    const tiers = {
      words: this.words.map(marked(({ text }) => text)),
      phones: this.phones.map(marked(({ symbol }) => symbol)),
    };
    return written(tiers, this.seconds);
  }
}

function written(tiers, seconds) {
  const ends = Object.values(tiers).flat().map(([, end]) => end);
  const end = Math.max(seconds, ...ends);
  const lines = [
    'File type = "ooTextFile"',
    'Object class = "TextGrid"',
    "",
    "xmin = 0",
    `xmax = ${end.toFixed(6)}`,
    "tiers? <exists>",
    `size = ${Object.keys(tiers).length}`,
    "item []:",
  ];
  Object.entries(tiers).forEach(([name, intervals], place) => {
    const covering = filled(intervals, end);
    lines.push(
      `    item [${place + 1}]:`,
      '        class = "IntervalTier"',
      `        name = "${name}"`,
      "        xmin = 0",
      `        xmax = ${end.toFixed(6)}`,
      `        intervals: size = ${covering.length}`,
    );
    covering.forEach(([from, to, text], i) => {
      lines.push(
        `        intervals [${i + 1}]:`,
        `            xmin = ${from.toFixed(6)}`,
        `            xmax = ${to.toFixed(6)}`,
        `            text = "${text.replaceAll('"', '""')}"`,
      );
    });
  });
  return `${lines.join("\n")}\n`;
}

// Add intervals without text between the intervals and up to the end.
function filled(intervals, end) {
  const found = [];
  let covered = 0;
  for (const [from, to, text] of intervals) {
    if (from > covered) found.push([covered, from, ""]);
    found.push([from, to, text]);
    covered = to;
  }
  if (end > covered) found.push([covered, end, ""]);
  return found;
}
