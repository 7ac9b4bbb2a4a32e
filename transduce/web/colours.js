// The colours of the maps, and the theme's colours for drawing on a canvas.

const SIZE = 256;

// Convert OKLCH to sRGB in [0, 1]; null if sRGB lacks the colour.
function rgbOf(lightness, chroma, hue) {
  const a = chroma * Math.cos((hue * Math.PI) / 180);
  const b = chroma * Math.sin((hue * Math.PI) / 180);
  const l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3;
  const linear = [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
  ];
  if (linear.some((x) => x < -0.001 || x > 1.001)) return null;
  return linear.map((x) => {
    const inside = Math.min(1, Math.max(0, x));
    return inside <= 0.0031308 ? 12.92 * inside : 1.055 * inside ** (1 / 2.4) - 0.055;
  });
}

// Equal steps in value are equal steps in lightness; the hue goes from indigo over red to yellow.
function heatTable() {
  const table = new Uint8ClampedArray(3 * SIZE);
  for (let i = 0; i < SIZE; i++) {
    const x = i / (SIZE - 1);
    const hue = 285 + 175 * x ** 0.9;
    let chroma = 0.03 + 0.19 * Math.sin(Math.PI * Math.min(1, 0.06 + 0.86 * x)) ** 0.9;
    let rgb = null;
    while ((rgb = rgbOf(0.16 + 0.81 * x, chroma, hue)) === null) chroma -= 0.002;
    table.set(rgb.map((c) => 255 * c), 3 * i);
  }
  return table;
}

export const HEAT = heatTable();

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

const NAMES = ["paper", "panel", "ink", "muted", "line", "blue", "red", "green", "accent", "low", "high"];

export function theme() {
  const style = getComputedStyle(document.documentElement);
  return Object.fromEntries(NAMES.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}
