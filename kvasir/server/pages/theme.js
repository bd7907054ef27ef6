// Runs before the page is drawn, so that a chosen theme does not flash. Kept apart from the modules, which come later.
"use strict";

const THEMES = ["", "light", "dark"]; // "": as the system has it

function applyTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
}

function storedTheme() {
  try {
    return localStorage.getItem("kvasir-theme") || "";
  } catch {
    return ""; // storage is forbidden; the choice lasts as long as the page
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
