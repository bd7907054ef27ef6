// Runs before the page is drawn, so that the chosen theme does not flash. Not a module, because modules run later.
"use strict";

const THEMES = ["", "light", "dark"]; // "": follow the system

function applyTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
}

function storedTheme() {
  try {
    return localStorage.getItem("kvasir-theme") || "";
  } catch {
    return ""; // storage is blocked: the choice lasts until the page is closed
  }
}

applyTheme(storedTheme());

document.addEventListener("DOMContentLoaded", () => {
  document.getElementById("theme").addEventListener("click", () => {
    const now = document.documentElement.dataset.theme || "";
    const next = THEMES[(THEMES.indexOf(now) + 1) % THEMES.length];
    applyTheme(next);
    try {
      localStorage.setItem("kvasir-theme", next);
    } catch {
      // see above
    }
    document.dispatchEvent(new Event("themechange"));
  });
});
