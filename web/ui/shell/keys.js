// Keyboard shortcuts of the whole page. They can be turned off (WCAG 2.1.4),
// since people who speak to their computer set off single keys by accident.

import { byId, h } from "../lib/dom.js";

const storage = "kproxy-keys";

// documented is what the help dialog lists.
const documented = [
  [["/"], "Search services"],
  [["g", "o"], "Go to the services"],
  [["g", "n"], "Go to the node"],
  [["?"], "This help"],
  [["Esc"], "Close; clear and leave the search; back from a service"],
  [["↑", "↓"], "Move in the list of services (also Page Up, Page Down, Home, End)"],
  [["Enter"], "Open the service"],
];

// keys installs the shortcuts. search and back are called for "/" and Escape, list for
// an arrow while nothing in the page has the focus.
export function keys({ search, back, list }) {
  const help = byId("help"), on = byId("keys-on");
  on.checked = read() !== "off";
  on.addEventListener("change", () => write(on.checked ? "on" : "off"));
  byId("help-open").addEventListener("click", () => help.showModal());
  help.addEventListener("click", (e) => {
    if (e.target === help) help.close(); // the backdrop
  });
  for (const [names, what] of documented) {
    byId("help-keys").append(h("tr", null, h("td", { class: "nowrap" }, names.map((k, i) => [i > 0 ? " " : "", h("kbd", { text: k })])), h("td", { text: what })));
  }
  let went = 0; // when g was pressed
  document.addEventListener("keydown", (e) => {
    if (e.ctrlKey || e.metaKey || e.altKey || help.open || e.defaultPrevented) return;
    if (e.key === "Escape") return void back(e);
    // No character keys, so they work where single keys are turned off, too.
    if ((e.key === "ArrowDown" || e.key === "ArrowUp") && (e.target === document.body || e.target.id === "main")) {
      if (list()) e.preventDefault();
      return;
    }
    if (!on.checked || e.target.closest("input:not([type=checkbox]), select, textarea")) return;
    const second = Date.now() - went < 2500;
    went = 0;
    if (e.key === "/") search();
    else if (e.key === "?") help.showModal();
    else if (second && e.key === "o") location.hash = "#/";
    else if (second && e.key === "n") location.hash = "#/node";
    else if (e.key === "g") {
      went = Date.now();
      return;
    } else return;
    e.preventDefault();
  });
}

function read() {
  try {
    return localStorage.getItem(storage);
  } catch {
    return null;
  }
}

function write(value) {
  try {
    localStorage.setItem(storage, value);
  } catch {
    // Not kept for the next visit, then.
  }
}
