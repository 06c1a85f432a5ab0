// Elements. Text only ever goes in as text.

export const $ = (id) => document.getElementById(id);

// h("p", { class: "note", onclick: f }, "text", element, null)
export function h(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [property, set] of Object.entries(value)) made.style.setProperty(property, set);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

// Sets text without touching the page where nothing changes: a selection survives.
export function put(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// Replaces children only where `state` differs from the last time.
export function refill(element, state, make) {
  const told = JSON.stringify(state);
  if (element._told === told) return;
  element._told = told;
  element.replaceChildren(...[make()].flat());
}
