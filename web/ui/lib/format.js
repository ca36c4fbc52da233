// Numbers, durations and times as people read them. Pure: what depends on the
// present moment takes it as an argument.

const nothing = "–";

// count prints a whole number briefly: 950, 1.2k, 34k, 5.6M.
export function count(n) {
  if (n === undefined || n === null || Number.isNaN(n)) return nothing;
  const steps = [[1e9, "G"], [1e6, "M"], [1e3, "k"]];
  for (const [size, unit] of steps) {
    // 999,950 would round to 1000.0k.
    if (Math.abs(n) >= size * 0.9995 && Math.abs(n) >= 1000) return significant(n / size) + unit;
  }
  return String(Math.round(n));
}

// exact prints a whole number in full, in groups of three digits.
export function exact(n) {
  return n === undefined || n === null ? nothing : String(Math.round(n)).replace(/\B(?=(\d{3})+$)/g, ",");
}

// rate prints a number per second: 0, 0.4, 12, 3.4k.
export function rate(n) {
  if (n === undefined || n === null || Number.isNaN(n)) return nothing;
  if (n === 0) return "0";
  if (n < 0.05) return "<0.1";
  return n < 9.95 ? trim(n.toFixed(1)) : count(n);
}

// bytes prints a size in powers of 1024: 0 B, 812 B, 4.0 KiB.
export function bytes(n) {
  if (n === undefined || n === null || Number.isNaN(n)) return nothing;
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let i = 0;
  while (n >= 1023.5 && i < units.length - 1) {
    n /= 1024;
    i++;
  }
  return (i === 0 ? String(Math.round(n)) : significant(n)) + " " + units[i];
}

// percent prints a share of 0 to 1.
export function percent(share) {
  if (share === undefined || share === null || Number.isNaN(share)) return nothing;
  const p = share * 100;
  if (p > 0 && p < 1) return "<1%";
  return (Math.abs(p - Math.round(p)) < 0.05 ? String(Math.round(p)) : p.toFixed(1)) + "%";
}

// seconds prints how long something took: 0.4 ms, 12 ms, 1.5 s.
export function seconds(s) {
  if (s === undefined || s === null || Number.isNaN(s)) return nothing;
  if (s < 0.0095) return trim((s * 1000).toFixed(1)) + " ms";
  if (s < 0.9995) return Math.round(s * 1000) + " ms";
  return s < 59.95 ? trim(s.toFixed(1)) + " s" : duration(s);
}

// duration prints a time span with its two largest units: 4 s, 3 min 20 s, 2 h 5 min.
export function duration(s) {
  if (s === undefined || s === null || Number.isNaN(s)) return nothing;
  s = Math.max(0, Math.round(s));
  const units = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
  const parts = [];
  for (const [size, unit] of units) {
    if (parts.length === 2) break;
    const n = Math.floor(s / size);
    if (n > 0 || (parts.length === 0 && size === 1)) parts.push(`${n} ${unit}`);
    else if (parts.length > 0) break;
    s -= n * size;
  }
  return parts.join(" ");
}

// ago prints how long before now (milliseconds) an RFC 3339 time was.
export function ago(time, now) {
  const at = Date.parse(time);
  if (!isSet(time)) return "never";
  const s = (now - at) / 1000;
  return s < 1.5 ? "just now" : duration(s) + " ago";
}

// countdown prints how long after now (milliseconds) a time is; empty once it is over.
export function countdown(time, now) {
  if (!isSet(time)) return "";
  const s = (Date.parse(time) - now) / 1000;
  return s <= 0 ? "" : duration(Math.ceil(s));
}

// clock prints a time of day in the reader's zone, 14:03:27; with its date, 2026-11-24 14:03:27,
// where that isn't the date of now (milliseconds).
export function clock(time, now) {
  if (!isSet(time)) return nothing;
  const d = new Date(time), two = (n) => String(n).padStart(2, "0");
  const day = (x) => [x.getFullYear(), two(x.getMonth() + 1), two(x.getDate())].join("-");
  const text = [d.getHours(), d.getMinutes(), d.getSeconds()].map(two).join(":");
  return day(d) === day(new Date(now)) ? text : `${day(d)} ${text}`;
}

// isSet reports whether a time (RFC 3339, or milliseconds) is one: Go's zero time is
// the year 1.
export function isSet(time) {
  if (typeof time === "number") return time > 0;
  return Boolean(time) && !Number.isNaN(Date.parse(time)) && !String(time).startsWith("0001-");
}

// plural prints "1 endpoint", "3 endpoints".
export function plural(n, one, many = one + "s") {
  return `${exact(n)} ${n === 1 ? one : many}`;
}

function significant(n) {
  return Math.abs(n) < 9.95 ? n.toFixed(1) : String(Math.round(n));
}

function trim(s) {
  return s.endsWith(".0") ? s.slice(0, -2) : s;
}
