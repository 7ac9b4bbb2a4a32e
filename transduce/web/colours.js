// The colours of the maps, and the theme's colours for drawing on a canvas.

const SIZE = 256;

// The colours of maps, from the smallest value to the largest, which the server sends: red, green,
// blue, red, ... They are those of the sensitivities in `transduce plot`.
export const HEAT = new Uint8ClampedArray(3 * SIZE);

// Build a table of greys between two colours of the theme.
export function between(low, high) {
  const [from, to] = [low, high].map(parsed);
  const table = new Uint8ClampedArray(3 * SIZE);
  for (let i = 0; i < 3 * SIZE; i++) {
    const x = Math.floor(i / 3) / (SIZE - 1);
    table[i] = from[i % 3] + x * (to[i % 3] - from[i % 3]);
  }
  return table;
}

function parsed(hex) {
  return [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
}

export function css(table, x) {
  const i = 3 * Math.round(x * (SIZE - 1));
  return `rgb(${table[i]}, ${table[i + 1]}, ${table[i + 2]})`;
}

// Draw values [columns, rows] as an image, one pixel each; `scale` maps a value to [0, 1]. The first
// row is at the bottom.
export function painted(values, columns, rows, scale, table) {
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, columns);
  canvas.height = Math.max(1, rows);
  if (columns * rows === 0) return canvas;
  const context = canvas.getContext("2d");
  const image = context.createImageData(columns, rows);
  for (let column = 0; column < columns; column++) {
    for (let row = 0; row < rows; row++) {
      const x = scale(values[column * rows + row]);
      const from = 3 * Math.round((SIZE - 1) * Math.min(1, Math.max(0, x || 0)));
      const to = 4 * ((rows - 1 - row) * columns + column);
      image.data[to] = table[from];
      image.data[to + 1] = table[from + 1];
      image.data[to + 2] = table[from + 2];
      image.data[to + 3] = 255;
    }
  }
  context.putImageData(image, 0, 0);
  return canvas;
}

const NAMES = ["paper", "panel", "ink", "muted", "line", "accent", "path", "low", "high"];
NAMES.push("blue", "red", "green"); // of the bar graphs

export function theme() {
  const style = getComputedStyle(document.documentElement);
  return Object.fromEntries(NAMES.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}
