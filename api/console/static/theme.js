/* Colours before the first paint: a plain script in the head, so that no page flashes white at night. */
(() => {
  "use strict";
  const KEY = "labeler.theme";
  const root = document.documentElement;

  function stored() {
    try {
      const value = localStorage.getItem(KEY);
      return value === "light" || value === "dark" ? value : "auto";
    } catch {
      return "auto"; // storage may be forbidden; the page works without remembering
    }
  }

  function apply(theme) {
    root.dataset.theme = theme;
    document.dispatchEvent(new Event("themechange"));
  }

  apply(stored());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    document.dispatchEvent(new Event("themechange"));
  });
  document.addEventListener("DOMContentLoaded", () => {
    for (const choice of document.querySelectorAll("#theme input")) {
      choice.checked = choice.value === root.dataset.theme;
      choice.addEventListener("change", () => {
        try {
          localStorage.setItem(KEY, choice.value);
        } catch {
          // as above
        }
        apply(choice.value);
      });
    }
  });
})();
