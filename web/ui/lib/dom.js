// Making elements without HTML: data only ever becomes text or attribute values,
// so nothing that a Service is called can become markup.

const svgNamespace = "http://www.w3.org/2000/svg";

// h makes an element. Properties: class, text, data (an object), on (an object of
// listeners), and attributes by name; false, null and undefined leave one out.
export function h(tag, props, ...children) {
  return fill(document.createElement(tag), props, children);
}

// s is h for SVG.
export function s(tag, props, ...children) {
  return fill(document.createElementNS(svgNamespace, tag), props, children);
}

function fill(el, props, children) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "text") el.textContent = value;
    else if (name === "data") Object.assign(el.dataset, value);
    else if (name === "on") for (const [event, f] of Object.entries(value)) el.addEventListener(event, f);
    else el.setAttribute(name, value === true ? "" : value);
  }
  for (const c of children.flat(Infinity)) if (c !== null && c !== undefined && c !== false) el.append(c);
  return el;
}

// icon refers to a symbol of index.html. Icons are decoration: what they mean
// stands beside them as text.
export function icon(id) {
  return s("svg", { class: "icon", viewBox: "0 0 16 16", "aria-hidden": "true", focusable: "false" }, s("use", { href: `#${id}` }));
}

// setIcon changes which symbol an icon shows.
export function setIcon(el, id) {
  const use = el.querySelector("use");
  if (use.getAttribute("href") !== `#${id}`) use.setAttribute("href", `#${id}`);
}

// setText writes only what differs, so that what a reader selected stays so, and
// the page isn't laid out again for nothing.
export function setText(el, text) {
  if (el.textContent !== text) el.textContent = text;
}

export function setAttr(el, name, value) {
  if (value === null || value === undefined || value === false) el.removeAttribute(name);
  else if (el.getAttribute(name) !== String(value)) el.setAttribute(name, value);
}

// time makes a <time>: brief text, and the full time in ISO form as its title.
export function time(text, iso) {
  return h("time", { datetime: iso, title: iso ? new Date(iso).toISOString() : null, text });
}

// byId finds what index.html promises; that it is missing is a mistake of ours.
export function byId(id) {
  const el = document.getElementById(id);
  if (!el) throw new Error(`find element: index.html has no #${id}`);
  return el;
}
