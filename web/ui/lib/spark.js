// Geometry of sparklines and area charts. Pure: samples in, path data out.

// line returns the SVG path of samples, oldest first, in a box of width and height
// where a full history has slots samples; a shorter one ends at the right edge too.
// The scale begins at 0 and ends at max.
export function line(samples, { width, height, slots, max, pad = 1.5 }) {
  const top = Math.max(max, 1e-9);
  const step = width / Math.max(1, slots - 1);
  const left = width - (samples.length - 1) * step;
  let d = "";
  for (let i = 0; i < samples.length; i++) {
    const y = height - pad - (samples[i] / top) * (height - 2 * pad);
    d += `${i === 0 ? "M" : "L"}${fixed(left + i * step)} ${fixed(y)}`;
  }
  return d;
}

// area closes line's path along the lower edge.
export function area(samples, box) {
  if (samples.length === 0) return "";
  const step = box.width / Math.max(1, box.slots - 1);
  const left = box.width - (samples.length - 1) * step;
  return `${line(samples, box)}L${fixed(box.width)} ${box.height}L${fixed(left)} ${box.height}Z`;
}

// thin returns at most n samples, each the largest of its bucket: a peak of one
// second must not vanish because the chart is narrow.
export function thin(samples, n) {
  if (samples.length <= n) return samples;
  const out = [];
  for (let i = 0; i < n; i++) {
    const from = Math.floor((i * samples.length) / n);
    const to = Math.floor(((i + 1) * samples.length) / n);
    let max = samples[from];
    for (let j = from + 1; j < to; j++) max = Math.max(max, samples[j]);
    out.push(max);
  }
  return out;
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
