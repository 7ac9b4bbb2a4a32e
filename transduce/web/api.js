// Requests to the server. Every failure is a Problem with a sentence to show.

export class Problem extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status; // 410: the server no longer keeps the input
  }
}

async function fetched(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch {
    throw new Problem("The server does not answer; start transduce explore again.");
  }
  if (response.ok) return response;
  let message = `the server answered ${response.status}`;
  try {
    message = (await response.json()).message ?? message;
  } catch {
    // The body is no message of ours; show the status.
  }
  throw new Problem(sentence(message), response.status);
}

// Add a full stop, and a capital if the message begins with a word rather than a path.
function sentence(text) {
  const full = /[.!?…]$/.test(text) ? text : `${text}.`;
  return /^[a-z]+ /.test(full) ? full[0].toUpperCase() + full.slice(1) : full;
}

function asked(path, body) {
  const headers = { "Content-Type": "application/json" };
  return fetched(path, { method: "POST", headers, body: JSON.stringify(body) });
}

export const describeModel = async () => (await fetched("api/model")).json();

export async function listExamples(search, first) {
  const query = new URLSearchParams({ search, first });
  return (await fetched(`api/examples?${query}`)).json();
}

export async function openSource(source) {
  if (source.kind === "example") {
    return (await asked("api/example", { index: source.index })).json();
  }
  if (source.kind === "text") return (await asked("api/text", { text: source.text })).json();
  const query = new URLSearchParams({ name: source.file.name });
  const options = { method: "POST", body: source.file };
  return (await fetched(`api/sound?${query}`, options)).json();
}

export const fetchLattice = async (input, target) =>
  unpacked(await (await asked("api/lattice", { input, target })).arrayBuffer());

export const fetchSpeech = async (input, generation) =>
  unpacked(await (await asked("api/speech", { input, generation })).arrayBuffer());

export const fetchNode = async (view, t, u) =>
  unpacked(await (await asked("api/node", { view, t, u })).arrayBuffer());

export const fetchSensitivity = async (view, t, u) =>
  unpacked(await (await asked("api/sensitivity", { view, t, u })).arrayBuffer());

export const beginSearch = async (input, beamWidth) =>
  (await asked("api/search", { input, beam_width: beamWidth })).json();

export const fetchSteps = async (search) => (await asked("api/steps", { search })).json();

export const fetchAlignment = async (input, text) =>
  (await asked("api/alignment", { input, text })).json();

export const fetchSound = async (input) => (await fetched(`api/sound/${input}`)).blob();

// Open a stream of samples to the server. `callbacks` has a function for each type of message, and
// failed(problem), called when the server ends the stream.
export function openStream(callbacks) {
  const socket = new WebSocket(new URL("api/recording", location.href.replace(/^http/, "ws")));
  return new Promise((resolve, reject) => {
    let problem = new Problem("The server has ended the recording; start transduce explore again.");
    let end = reject; // until the stream has begun
    socket.onmessage = ({ data }) => {
      const message = JSON.parse(data);
      if (message.type === "error") problem = new Problem(sentence(message.message));
      else callbacks[message.type](message);
      if (message.type !== "begin") return;
      end = callbacks.failed;
      resolve(socket);
    };
    socket.onclose = () => end(problem);
  });
}

// Unpack the format that transduce/web/wire.py describes.
function unpacked(buffer) {
  const length = new DataView(buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  const arrays = {};
  let start = 4 + length;
  for (const [name, shape] of header.arrays) {
    const count = shape.reduce((product, size) => product * size, 1);
    arrays[name] = { shape, values: new Float32Array(buffer, start, count) };
    start += 4 * count;
  }
  return { header, arrays };
}
