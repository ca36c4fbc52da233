// Arithmetic of the virtual list: of thousands of rows of one height, only those
// near the viewport are in the document. Pure; lengths are in CSS pixels.

// overscan is how many rows beyond each edge are kept, so that a fast scroll
// doesn't show gaps before the next frame.
const overscan = 6;

// visible returns the range [first, end) of rows to render. top is where the list
// begins, relative to the viewport's upper edge (negative when it was scrolled past).
export function visible({ top, viewport, height, total }) {
  if (total === 0 || height <= 0) return { first: 0, end: 0 };
  const first = Math.floor(-top / height) - overscan;
  const end = Math.ceil((viewport - top) / height) + overscan;
  return { first: clamp(first, 0, total), end: clamp(end, 0, total) };
}

// page is how many rows PageDown moves by: what fits, less one to keep the place.
export function page({ viewport, covered, height }) {
  return Math.max(1, Math.floor((viewport - covered) / height) - 1);
}

// reveal returns by how much to scroll so that row index is in view, and not under
// what covers the viewport's upper edge; 0 if it is already.
export function reveal({ index, top, viewport, covered, height }) {
  const upper = top + index * height;
  if (upper < covered) return upper - covered;
  const lower = upper + height;
  if (lower > viewport) return lower - viewport;
  return 0;
}

// move returns the row that a key leads to from index; undefined for other keys.
export function move(key, index, total, pageRows) {
  const to = {
    ArrowDown: index + 1, ArrowUp: index - 1,
    PageDown: index + pageRows, PageUp: index - pageRows,
    Home: 0, End: total - 1,
  }[key];
  return to === undefined || total === 0 ? undefined : clamp(to, 0, total - 1);
}

function clamp(n, low, high) {
  return Math.min(Math.max(n, low), high);
}
