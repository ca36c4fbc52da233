// Runs before the first paint, so that a chosen colour scheme doesn't flash: not a
// module, since those wait for the document. theme.js has the rest.
(() => {
  try {
    const chosen = localStorage.getItem("kproxy-theme");
    if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
  } catch {
    // Storage may be forbidden; the system's scheme it is.
  }
})();
