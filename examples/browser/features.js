// Samples -> frames, as transduce/audio/features.py computes them; sums are in float64.

// Return a function from samples (Float32Array in [-1, 1] at features.sample_rate) to frames:
// { data: Float32Array of T x size numbers, T, size }. `features` is that of model.json.
export function frameComputer(features) {
  const { convention } = features;
  const windowSize = Math.round(features.window * features.sample_rate);
  const shift = Math.round(features.shift * features.sample_rate);
  const fftSize = 2 ** Math.ceil(Math.log2(windowSize));
  const weights = windowWeights(convention.weighting, windowSize);
  const filters = melFilters(features, fftSize);
  const cosines = features.kind === "cepstra" ? lifteredCosines(features) : null;
  const real = new Float64Array(fftSize);
  const imaginary = new Float64Array(fftSize);
  const window = new Float64Array(windowSize);

  // Return the frame of the window that begins at sample `start`, without deltas.
  function frame(samples, start) {
    for (let i = 0; i < windowSize; i++) {
      window[i] = convention.sample_scale * samples[mirrored(start + i, samples.length)];
    }
    if (convention.remove_mean) {
      const mean = window.reduce((sum, x) => sum + x, 0) / windowSize;
      window.forEach((x, i) => (window[i] = x - mean));
    }
    const energy = window.reduce((sum, x) => sum + x * x, 0);
    real.fill(0);
    imaginary.fill(0);
    for (let i = 0; i < windowSize; i++) {
      real[i] = (window[i] - features.pre_emphasis * window[Math.max(0, i - 1)]) * weights[i];
    }
    transform(real, imaginary);
    const logMel = filters.map(({ first, heights }) => {
      let sum = 0;
      heights.forEach((height, i) => {
        sum += height * (real[first + i] ** 2 + imaginary[first + i] ** 2);
      });
      return logOf(sum);
    });
    if (!cosines) return logMel;
    const cepstra = cosines.map((row) => row.reduce((sum, c, i) => sum + c * logMel[i], 0));
    return [logOf(energy), ...cepstra];
  }

  return (samples) => {
    const before = convention.centred ? Math.floor(windowSize / 2) - Math.floor(shift / 2) : 0;
    const count = convention.centred
      ? Math.floor((samples.length + Math.floor(shift / 2)) / shift)
      : Math.max(0, Math.floor((samples.length - windowSize) / shift) + 1);
    let orders = [Array.from({ length: count }, (_, t) => frame(samples, t * shift - before))];
    for (let i = 0; i < features.num_deltas; i++) {
      orders.push(deltas(orders[i], features.delta_reach));
    }
    const rows = orders[0].map((_, t) => orders.flatMap((order) => order[t]));
    const size = rows.length ? rows[0].length : 0;
    return { data: Float32Array.from(rows.flat()), T: count, size };
  };
}

const logOf = (x) => Math.log(Math.max(x, 2 ** -23));

// Mirror a place outside the sound into it.
function mirrored(place, length) {
  const within = ((place % (2 * length)) + 2 * length) % (2 * length);
  return within < length ? within : 2 * length - 1 - within;
}

function windowWeights(weighting, size) {
  const cosine = (i, period) => Math.cos((2 * Math.PI * i) / period);
  const shapes = {
    hamming: (i) => 0.54 - 0.46 * cosine(i, size - 1),
    povey: (i) => (0.5 - 0.5 * cosine(i, size - 1)) ** 0.85,
    hann: (i) => 0.5 - 0.5 * cosine(i, size),
  };
  return Float64Array.from({ length: size }, (_, i) => shapes[weighting](i));
}

// Return for each channel its first bin and the heights of the filter from there on.
function melFilters(features, fftSize) {
  const { num_channels: channels, sample_rate: rate, convention } = features;
  const top = rate / 2 - convention.unused;
  const slaney = convention.mel_scale === "slaney";
  const toMel = (hertz) => {
    if (!slaney) return 1127 * Math.log(1 + hertz / 700);
    return hertz < 1000 ? (hertz * 3) / 200 : 15 + (27 * Math.log(hertz / 1000)) / Math.log(6.4);
  };
  const toHertz = (mel) =>
    mel < 15 ? (mel * 200) / 3 : 1000 * Math.exp(((mel - 15) * Math.log(6.4)) / 27);
  // HTK's filters are triangles in mel, Slaney's are triangles in hertz with area 1.
  const scale = slaney ? (hertz) => hertz : toMel;
  const edge = (k) => {
    const mel = (toMel(top) / (channels + 1)) * k;
    return slaney ? toHertz(mel) : mel;
  };
  return Array.from({ length: channels }, (_, channel) => {
    const [left, peak, right] = [edge(channel), edge(channel + 1), edge(channel + 2)];
    const heights = Array.from({ length: fftSize / 2 + 1 }, (_, bin) => {
      const x = scale((bin * rate) / fftSize);
      const height = Math.max(0, Math.min((x - left) / (peak - left), (right - x) / (right - peak)));
      return slaney ? (height * 2) / (right - left) : height;
    });
    const first = Math.max(0, heights.findIndex((height) => height > 0));
    return { first, heights: heights.slice(first, heights.findLastIndex((h) => h > 0) + 1) };
  });
}

function lifteredCosines({ num_channels: channels, num_cepstra: cepstra, lifter }) {
  return Array.from({ length: cepstra }, (_, i) => {
    const n = i + 1;
    const lift = lifter ? 1 + (lifter / 2) * Math.sin((Math.PI * n) / lifter) : 1;
    return Array.from(
      { length: channels },
      (_, c) => lift * Math.sqrt(2 / channels) * Math.cos((Math.PI / channels) * (c + 0.5) * n),
    );
  });
}

// Return the slope of each number around each frame; the first and last frame are repeated.
function deltas(frames, reach) {
  let squares = 0;
  for (let n = 1; n <= reach; n++) squares += 2 * n * n;
  return frames.map((frame, t) =>
    frame.map((_, d) => {
      let slope = 0;
      for (let n = 1; n <= reach; n++) {
        const ahead = frames[Math.min(t + n, frames.length - 1)][d];
        slope += n * (ahead - frames[Math.max(t - n, 0)][d]);
      }
      return slope / squares;
    }),
  );
}

// Transform complex numbers in place by the fast Fourier transform; their number is a power of 2.
function transform(real, imaginary) {
  const size = real.length;
  for (let i = 1, j = 0; i < size; i++) {
    let bit = size >> 1;
    for (; j & bit; bit >>= 1) j ^= bit;
    j ^= bit;
    if (i < j) {
      [real[i], real[j]] = [real[j], real[i]];
      [imaginary[i], imaginary[j]] = [imaginary[j], imaginary[i]];
    }
  }
  for (let span = 2; span <= size; span *= 2) {
    for (let k = 0; k < span / 2; k++) {
      const angle = (-2 * Math.PI * k) / span;
      const [c, s] = [Math.cos(angle), Math.sin(angle)];
      for (let i = k; i < size; i += span) {
        const j = i + span / 2;
        const re = real[j] * c - imaginary[j] * s;
        const im = real[j] * s + imaginary[j] * c;
        real[j] = real[i] - re;
        imaginary[j] = imaginary[i] - im;
        real[i] += re;
        imaginary[i] += im;
      }
    }
  }
}
