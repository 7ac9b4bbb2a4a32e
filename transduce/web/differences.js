// The differences between two sequences of symbols.

const AROUND = 2; // equal symbols shown on either side of a difference
const MOST_PAIRS = 4_000_000; // symbols of the one times symbols of the other that are compared

// Return the steps from `best` to `other`, each [kind, symbol]: "same", "out" (only in `best`) or
// "in" (only in `other`), with the longest possible common subsequence; null for long sequences.
export function differences(best, other) {
  const [n, m] = [best.length, other.length];
  if (n * m > MOST_PAIRS) return null;
  // common[i][j] is the length of the longest common subsequence of best[i:] and other[j:].
  const common = Array.from({ length: n + 1 }, () => new Uint16Array(m + 1));
  for (let i = n - 1; i >= 0; i--) {
    for (let j = m - 1; j >= 0; j--) {
      common[i][j] =
        best[i] === other[j]
          ? common[i + 1][j + 1] + 1
          : Math.max(common[i + 1][j], common[i][j + 1]);
    }
  }
  const steps = [];
  let [i, j] = [0, 0];
  while (i < n || j < m) {
    if (i < n && j < m && best[i] === other[j]) {
      steps.push(["same", best[i]]);
      [i, j] = [i + 1, j + 1];
    } else if (i < n && (j === m || common[i + 1][j] >= common[i][j + 1])) {
      steps.push(["out", best[i++]]);
    } else steps.push(["in", other[j++]]);
  }
  return steps;
}

// Replace the equal symbols that are far from all differences by one ["gap", "…"].
export function shortened(steps) {
  const isNear = (i) =>
    steps.slice(Math.max(0, i - AROUND), i + AROUND + 1).some(([kind]) => kind !== "same");
  const kept = [];
  steps.forEach((step, i) => {
    if (isNear(i)) kept.push(step);
    else if (kept.at(-1)?.[0] !== "gap") kept.push(["gap", "…"]);
  });
  return kept;
}
