// Where the boxes and lines of the path diagram go. Pure arithmetic: a width and
// how many endpoints there are in, rectangles and SVG path data out. A wide diagram
// runs from left to right, a narrow one downwards.

// narrow is the width below which the diagram runs downwards.
export const narrow = 760;

const gap = 10;
const endpointHeight = 46;

// layout returns {width, height, vertical, boxes: {id: {x, y, w, h}}, bands: [{id,
// x, y, w, h}], edges: {id: {d, end: {x, y}, label: {x, y, anchor}}}}. Boxes are
// client, hook, check, userspace, kernel and endpoint-0 …; edges are named from-to.
export function layout(width, endpoints) {
  return width < narrow ? downwards(width, endpoints) : rightwards(width, endpoints);
}

function rightwards(width, n) {
  const lane = Math.max(52, Math.round(width * 0.062)); // room for a line and its label
  const free = width - 4.25 * lane - 28;
  const w = { client: free * 0.145, hook: free * 0.185, check: free * 0.215, branch: free * 0.215, endpoint: free * 0.24 };
  const column = Math.max(n, 1) * endpointHeight + (Math.max(n, 1) - 1) * gap;
  const user = 118, kernel = Math.max(178, column + 60 - user), top = 8;
  const height = top + user + kernel + 8;
  const middle = top + user + kernel / 2 + 8;
  const x = { client: 2 };
  x.hook = x.client + w.client + lane * 1.25;
  x.check = x.hook + w.hook + lane * 0.5;
  x.branch = x.check + w.check + lane * 1.5;
  x.endpoint = x.branch + w.branch + lane + 12;
  const box = (left, centre, wide, high) => ({ x: round(left), y: round(centre - high / 2), w: round(wide), h: high });
  const boxes = {
    client: box(x.client, middle, w.client, 84),
    hook: box(x.hook, middle, w.hook, 84),
    check: box(x.check, middle, w.check, 96),
    userspace: box(x.branch, top + user / 2 + 8, w.branch, 84),
    kernel: box(x.branch, middle, w.branch, 96),
  };
  const first = top + (user + kernel - column) / 2;
  for (let i = 0; i < n; i++) {
    boxes[`endpoint-${i}`] = { x: round(x.endpoint), y: round(first + i * (endpointHeight + gap)), w: round(width - x.endpoint - 2), h: endpointHeight };
  }
  const frame = { x: round(x.hook - 14), w: round(x.branch + w.branch + 14 - (x.hook - 14)) };
  const bands = [{ id: "user", ...frame, y: top, h: user }, { id: "kernel", ...frame, y: top + user, h: kernel }];
  const edges = {
    "client-hook": across(boxes.client, boxes.hook),
    "hook-check": across(boxes.hook, boxes.check),
    "check-userspace": across(boxes.check, boxes.userspace, 0.25),
    "check-kernel": across(boxes.check, boxes.kernel),
  };
  for (let i = 0; i < n; i++) {
    const to = boxes[`endpoint-${i}`];
    edges[`userspace-${i}`] = across(boxes.userspace, to);
    edges[`kernel-${i}`] = across(boxes.kernel, to);
  }
  return { width, height, vertical: false, boxes, bands, edges };
}

// across is a line from a box's right side to another's left one, straight where
// they are level, else an S.
function across(a, b, from = 0.5) {
  const x1 = a.x + a.w, y1 = a.y + a.h * from, x2 = b.x - 6, y2 = b.y + b.h / 2;
  const mid = (x1 + x2) / 2;
  const d = Math.abs(y1 - y2) < 1 ? `M${round(x1)} ${round(y1)}H${round(x2)}` : `M${round(x1)} ${round(y1)}C${round(mid)} ${round(y1)} ${round(mid)} ${round(y2)} ${round(x2)} ${round(y2)}`;
  return { d, end: { x: round(x2), y: round(y2), down: false }, label: { x: round(mid), y: round(Math.min(y1, y2) + (Math.abs(y1 - y2) < 1 ? 0 : Math.abs(y1 - y2) / 2)), anchor: "middle" } };
}

function downwards(width, n) {
  const high = { client: 80, hook: 80, check: 80, branch: 112 };
  const lane = 40;
  const inner = 10;
  let y = 2;
  const boxes = {};
  const full = (id, h, inset) => {
    boxes[id] = { x: inset, y, w: width - 2 * inset, h };
    y += h + lane;
  };
  full("client", high.client, 2);
  const top = y - 8;
  full("hook", high.hook, inner + 2);
  full("check", high.check, inner + 2);
  const half = (width - 2 * (inner + 2) - 12) / 2;
  boxes.userspace = { x: inner + 2, y, w: round(half), h: high.branch };
  boxes.kernel = { x: round(inner + 2 + half + 12), y, w: round(half), h: high.branch };
  const bands = [{ id: "kernel", x: 2, y: top, w: width - 4, h: y + high.branch + 12 - top }];
  y += high.branch + lane + 12;
  for (let i = 0; i < n; i++) {
    boxes[`endpoint-${i}`] = { x: 26, y, w: width - 28, h: endpointHeight };
    y += endpointHeight + gap;
  }
  const edges = {
    "client-hook": down(boxes.client, boxes.hook, 0.5),
    "hook-check": down(boxes.hook, boxes.check, 0.5),
    "check-userspace": down(boxes.check, boxes.userspace, centre(boxes.userspace, boxes.check)),
    "check-kernel": down(boxes.check, boxes.kernel, centre(boxes.kernel, boxes.check)),
  };
  for (let i = 0; i < n; i++) {
    for (const id of ["userspace", "kernel"]) edges[`${id}-${i}`] = hang(boxes[id], boxes[`endpoint-${i}`]);
  }
  return { width, height: y, vertical: true, boxes, bands, edges };
}

// centre is where, as a share of b's width, a's middle lies.
function centre(a, b) {
  return (a.x + a.w / 2 - b.x) / b.w;
}

function down(a, b, share) {
  const x = round(a.x + a.w * share), y1 = a.y + a.h, y2 = b.y - 6;
  return { d: `M${x} ${y1}V${y2}`, end: { x, y: y2, down: true }, label: { x: x + 8, y: round((y1 + y2) / 2), anchor: "start" } };
}

// hang leads from below a box along the left margin to an endpoint.
function hang(a, b) {
  const x = round(a.x + a.w / 2), y1 = a.y + a.h, turn = y1 + 26, y2 = b.y + b.h / 2;
  return { d: `M${x} ${y1}V${turn}H14V${y2}H${b.x - 6}`, end: { x: b.x - 6, y: y2, down: false }, label: { x: x + 8, y: y1 + 14, anchor: "start" } };
}

function round(n) {
  return Math.round(n * 10) / 10;
}
