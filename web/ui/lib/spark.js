// Geometry of sparklines and area charts. Pure: samples in, path data out.

// line returns the SVG path of samples, oldest first, in a box of width and height
// where a full history has slots samples; a shorter one ends at the right edge too.
// The scale begins at 0 and ends at max.
export function line(samples, box) {
  return points(samples, box).map(([x, y], i) => `${i === 0 ? "M" : "L"}${x} ${y}`).join("");
}

// area closes line's path along the lower edge.
export function area(samples, box) {
  const p = points(samples, box);
  return p.length === 0 ? "" : `${line(samples, box)}L${p.at(-1)[0]} ${box.height}L${p[0][0]} ${box.height}Z`;
}

function points(samples, { width, height, slots, max, pad = 1.5 }) {
  const top = Math.max(max, 1e-9);
  const step = width / Math.max(1, slots - 1);
  const left = width - (samples.length - 1) * step;
  return samples.map((sample, i) => [fixed(left + i * step), fixed(height - pad - (sample / top) * (height - 2 * pad))]);
}

// thin returns at most n samples, each the largest of its bucket: a peak of one
// second must not vanish because the chart is narrow.
export function thin(samples, n) {
  if (samples.length <= n) return samples;
  const out = [];
  for (let i = 0; i < n; i++) {
    out.push(peak(samples.slice(Math.floor((i * samples.length) / n), Math.floor(((i + 1) * samples.length) / n))));
  }
  return out;
}

// peak returns the largest sample, 0 if there is none.
export function peak(samples) {
  return samples.reduce((a, b) => (b > a ? b : a), 0);
}

// ceiling returns a round number at or above max, for the end of a scale.
export function ceiling(max) {
  if (!(max > 0)) return 1;
  const unit = 10 ** Math.floor(Math.log10(max));
  for (const f of [1, 2, 5, 10]) if (max <= f * unit * (1 + 1e-9)) return f * unit;
  return 10 * unit;
}

function fixed(n) {
  return Math.round(n * 10) / 10;
}
