// The colour scheme: the system's, unless the reader chose one. early.js applies
// the choice before the first paint.

import { byId, setText } from "../lib/dom.js";

const order = ["system", "light", "dark"];
const key = "kproxy-theme";

export function theme() {
  let chosen = document.documentElement.dataset.theme ?? "system";
  const button = byId("theme");
  const show = () => {
    if (chosen === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = chosen;
    setText(byId("theme-label"), { system: "Theme: system", light: "Theme: light", dark: "Theme: dark" }[chosen]);
    button.title = "Colour scheme: " + chosen;
  };
  button.addEventListener("click", () => {
    chosen = order[(order.indexOf(chosen) + 1) % order.length];
    try {
      if (chosen === "system") localStorage.removeItem(key);
      else localStorage.setItem(key, chosen);
    } catch {
      // Not kept for the next visit, then.
    }
    show();
  });
  show();
}
