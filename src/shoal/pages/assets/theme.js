// Light or dark: as the system says, until the reader chooses. And small tools for all pages.
"use strict";

const THEMES = ["auto", "light", "dark"];
const ICONS = {
  auto: "M8 1a7 7 0 1 0 0 14A7 7 0 0 0 8 1zm0 1.6v10.8A5.4 5.4 0 0 1 8 2.6z",
  light: "M8 4.5a3.5 3.5 0 1 0 0 7 3.5 3.5 0 0 0 0-7zM7.3 0h1.4v2.6H7.3zm0 13.4h1.4V16H7.3zM0 7.3h2.6v1.4H0zm13.4 0H16v1.4h-2.6zM2 3l1-1 1.8 1.8-1 1zm9.2 9.2 1-1L14 13l-1 1zM2 13l1.8-1.8 1 1L3 14zm9.2-9.2L13 2l1 1-1.8 1.8z",
  dark: "M6.2 1A7 7 0 1 0 15 9.8 5.6 5.6 0 0 1 6.2 1z",
};
const system = matchMedia("(prefers-color-scheme: dark)");

function add(parent, tag, attributes = {}, text) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  parent.append(element);
  return element;
}

function dataOf(name) {
  const element = document.getElementById(`data-${name}`);
  return element ? JSON.parse(element.textContent) : null;
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

// Where the choice is kept. A page in a file may have no storage.
const memory = {
  get(name) { try { return localStorage.getItem(name); } catch { return null; } },
  set(name, value) { try { localStorage.setItem(name, value); } catch { /* it lasts as long as the page */ } },
};

let theme = THEMES.includes(memory.get("shoal-theme")) ? memory.get("shoal-theme") : "auto";

function paintTheme() {
  const dark = theme === "dark" || (theme === "auto" && system.matches);
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  document.dispatchEvent(new Event("themechange"));
}

function addThemeButton(parent) {
  const button = add(parent, "button", { class: "theme", type: "button" });
  const show = () => {
    button.title = `Theme: ${theme}`;
    button.setAttribute("aria-label", button.title);
    button.innerHTML = `<svg viewBox="0 0 16 16" fill="currentColor" aria-hidden="true"><path d="${ICONS[theme]}"/></svg>`;
  };
  button.addEventListener("click", () => {
    theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    memory.set("shoal-theme", theme);
    show();
    paintTheme();
  });
  show();
  return button;
}

system.addEventListener("change", paintTheme);
paintTheme();
