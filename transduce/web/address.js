// The address of a view: the input, the target, the map, the node and the zoom.

const SCALES = ["log", "linear"];
const DURATIONS = ["median", "drawn"];

// `view` has target, or, of speech, generation (null: the recording); node [t, u]; and, if the figure
// is zoomed, seen [t0, t1, u0, u1].
export function encoded(source, view, map, scale) {
  const query = new URLSearchParams();
  if (source.kind === "example") query.set("example", source.index);
  else if (source.kind === "text") query.set("text", source.text);
  else query.set("sound", source.file.name);
  if (view.target) query.set("target", view.target.join(" "));
  if (view.generation === null) query.set("recording", "");
  for (const [name, value] of Object.entries(view.generation ?? {})) query.set(name, value);
  query.set("map", map);
  query.set("scale", scale);
  query.set("node", view.node.join(","));
  if (view.seen) query.set("seen", view.seen.map((x) => Number(x.toFixed(2))).join(","));
  return `#${query}`;
}

// Parse an address; missing and malformed parts are undefined. `maps` are those that the page can
// show. `lost` is the name of a sound file, which an address cannot contain.
export function decoded(hash, maps) {
  const query = new URLSearchParams(hash.slice(1));
  const one = (name, allowed) => allowed.find((value) => value === query.get(name));
  let source;
  if (query.has("example")) source = { kind: "example", index: Number(query.get("example")) || 0 };
  else if (query.has("text")) source = { kind: "text", text: query.get("text") };
  return {
    source,
    lost: query.get("sound")?.slice(0, 100),
    map: one("map", maps),
    scale: one("scale", SCALES),
    view: {
      target: query.get("target")?.split(/\s+/).filter(Boolean),
      generation: generation(query, one("durations", DURATIONS)),
      node: numbers(query.get("node"), 2)?.map(Math.round),
      seen: numbers(query.get("seen"), 4),
    },
  };
}

// Parse how speech was generated; null: it is the recording.
function generation(query, durations) {
  if (query.has("recording")) return null;
  const drawn = numbers(`${query.get("temperature")},${query.get("seed")}`, 2);
  if (!drawn || !durations) return undefined;
  return { temperature: drawn[0], durations, seed: drawn[1] };
}

function numbers(text, count) {
  const list = (text ?? "").split(",").map(Number);
  return list.length === count && list.every(Number.isFinite) ? list : undefined;
}
